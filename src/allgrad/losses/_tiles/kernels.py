"""Triton kernels over tiles of scores: a matrix product, then an epilogue that reduces or stores it.

A program computes one tile, or several in a loop. Rows are the queries of one panel, columns are keys.
Scalars are read from device memory, not passed as arguments, so that the host never waits for the device:

    scalars   [ scale * log2(e), shift * log2(e), bias * log2(e), 1 if the shift failed else 0 ]

Exponentials and logarithms are to base 2. Tiles at the edge read zeros outside the matrix; these
elements are masked out of the sums and not stored.
"""

# mypy: ignore-errors
# ruff: noqa: N803, PLR0917
from __future__ import annotations

import triton
import triton.language as tl

from allgrad.losses._tiles.kernel_math import (
    LOG2E,
    fast_log2,
    fast_reciprocal,
    finite,
    log2_1p,
)

__all__ = [
    "add_rows",
    "combine_logs",
    "max_norms",
    "row_dots",
    "safe_softmax_tile",
    "safe_sums_tile",
    "sigmoid_tile",
    "softmax_tile",
    "sums_pair_tile",
    "sums_tile",
    "write_scalars",
]

# Above, 1 + 2^score is 2^score in float32. Four factors of such scores do not overflow.
MOST = tl.constexpr(24.0)
# Sizes that change from batch to batch must not trigger a compilation.
_SIZES = ("rows", "columns", "width", "first_pair", "count", "length")


@triton.jit
def _products(
    q, k, start_m, start_n, width,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start_k in range(0, width, BLOCK_K):
        left, right = q.load([start_m, start_k]), k.load([start_n, start_k])
        tile = tl.dot(left, right.T, tile, input_precision="tf32")  # of float32
    return tile


@triton.jit
def _far(index, length):
    return tl.cast(index, tl.int64) * length


@triton.jit
def _has_pairs(pid_m, pid_n, first_pair, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    start = first_pair + pid_m * BLOCK_M - pid_n * BLOCK_N
    return (start < BLOCK_N) & (start + BLOCK_M > 0)


@triton.jit
def _sums(
    q, k, scalars, row_parts, column_parts, rows, columns, width, first_pair, pid_m, pid_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HAS_COLUMNS: tl.constexpr,
    HAS_PAIRS: tl.constexpr,
):  # fmt: skip
    tile = _products(q, k, pid_m * BLOCK_M, pid_n * BLOCK_N, width, BLOCK_M, BLOCK_N, BLOCK_K)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    shift = tl.where(offs_n < columns, -tl.load(scalars + 1), float("-inf"))
    tile = tl.exp2(tile * tl.load(scalars) + shift[None, :])
    if HAS_PAIRS:
        tile = tl.where((offs_m + first_pair)[:, None] == offs_n[None, :], 0.0, tile)
    # Beside 2^24 keys and more, parts are further apart than an int32 can tell.
    row_parts, column_parts = row_parts + _far(pid_n, rows), column_parts + _far(pid_m, columns)
    tl.store(row_parts + offs_m, tl.sum(tile, 1), mask=offs_m < rows)
    if HAS_COLUMNS:
        if pid_m * BLOCK_M + BLOCK_M > rows:
            tile = tl.where((offs_m < rows)[:, None], tile, 0.0)
        tl.store(column_parts + offs_n, tl.sum(tile, 0), mask=offs_n < columns)


@triton.jit(do_not_specialize=_SIZES)
def sums_tile(
    q, k, scalars, row_parts, column_parts, rows, columns, width, first_pair,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HAS_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum exp(score - shift) along the rows and columns of a tile; one exp serves both sums."""
    num_pid_m = tl.cdiv(rows, BLOCK_M)
    pid_m, pid_n = tl.program_id(0) % num_pid_m, tl.program_id(0) // num_pid_m
    _sums(q, k, scalars, row_parts, column_parts, rows, columns, width, first_pair, pid_m, pid_n,
          BLOCK_M, BLOCK_N, BLOCK_K, HAS_COLUMNS, False)  # fmt: skip


@triton.jit(do_not_specialize=_SIZES)
def sums_pair_tile(
    q, k, scalars, row_parts, column_parts, rows, columns, width, first_pair,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HAS_COLUMNS: tl.constexpr,
    PAIR_TILES: tl.constexpr,
):  # fmt: skip
    """Recompute ``sums_tile`` without the pairs, for tiles that contain pairs.

    A row of tiles has at most PAIR_TILES of them. This is a kernel of its own because masking the
    pairs in ``sums_tile`` would need more registers and lower its occupancy.
    """
    pid_m = tl.program_id(0) // PAIR_TILES
    pid_n = (first_pair + pid_m * BLOCK_M) // BLOCK_N + tl.program_id(0) % PAIR_TILES
    if _has_pairs(pid_m, pid_n, first_pair, BLOCK_M, BLOCK_N) & (pid_n * BLOCK_N < columns):
        _sums(q, k, scalars, row_parts, column_parts, rows, columns, width, first_pair, pid_m, pid_n,
              BLOCK_M, BLOCK_N, BLOCK_K, HAS_COLUMNS, True)  # fmt: skip


@triton.jit(do_not_specialize=_SIZES)
def safe_sums_tile(
    q, k, scalars, row_parts, column_parts, rows, columns, width, first_pair,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HAS_COLUMNS: tl.constexpr,
):  # fmt: skip
    """If the shift failed: the log2 of the sums without pairs, with the maximum of each row or column.

    This is rare, so a fixed small number of programs loops over all tiles.
    """
    if tl.load(scalars + 3) == 0:
        return
    num_pid_m = tl.cdiv(rows, BLOCK_M)
    for pid in range(tl.program_id(0), num_pid_m * tl.cdiv(columns, BLOCK_N), tl.num_programs(0)):
        pid_m, pid_n = pid % num_pid_m, pid // num_pid_m
        tile = _products(q, k, pid_m * BLOCK_M, pid_n * BLOCK_N, width, BLOCK_M, BLOCK_N, BLOCK_K)
        offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
        offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = (offs_m < rows)[:, None] & (offs_n < columns)[None, :]
        mask &= (offs_m + first_pair)[:, None] != offs_n[None, :]
        tile = tl.where(mask, tile * tl.load(scalars), float("-inf"))
        top = finite(tl.max(tile, 1))
        sums = tl.sum(tl.exp2(tile - top[:, None]), 1)
        target = row_parts + _far(pid_n, rows) + offs_m
        tl.store(target, top + tl.log2(sums), mask=offs_m < rows)
        if HAS_COLUMNS:
            top = finite(tl.max(tile, 0))
            sums = tl.sum(tl.exp2(tile - top[None, :]), 0)
            target = column_parts + _far(pid_m, columns) + offs_n
            tl.store(target, top + tl.log2(sums), mask=offs_n < columns)


@triton.jit(do_not_specialize=_SIZES)
def combine_logs(parts, logs, scalars, count, length, BLOCK: tl.constexpr):
    """If the shift failed: add the parts to ``logs``, both log2 of sums, as log2(sum of 2^part)."""
    if tl.load(scalars + 3) == 0:
        return
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(logs + offs, mask=offs < length, other=0.0)
    for index in range(count):
        part = tl.load(parts + _far(index, length) + offs, mask=offs < length, other=0.0)
        top = finite(tl.maximum(total, part))
        total = top + tl.log2(tl.exp2(total - top) + tl.exp2(part - top))
    tl.store(logs + offs, total, mask=offs < length)


@triton.jit(do_not_specialize=_SIZES)
def softmax_tile(
    q, k, scalars, row_lse, column_lse, weights, rows, columns, width, smoothing,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HAS_COLUMNS: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr, STORE_SCALE: tl.constexpr,
):  # fmt: skip
    """Store the weights of a tile of scores times STORE_SCALE; those of pairs are not correct yet.

    ``row_lse`` and ``column_lse`` are to base 2. With a softmax along columns and a failed shift it
    stores nothing and ``safe_softmax_tile`` does the work. That case and the pairs are left out
    because they would need more registers and lower the occupancy.
    """
    if HAS_COLUMNS:  # noqa: SIM102  a constant at compile time, unlike the next condition
        if tl.load(scalars + 3) != 0:
            return
    num_pid_m = tl.cdiv(rows, BLOCK_M)
    start_m, start_n = (
        tl.program_id(0) % num_pid_m * BLOCK_M,
        tl.program_id(0) // num_pid_m * BLOCK_N,
    )
    tile = _products(q, k, start_m, start_n, width, BLOCK_M, BLOCK_N, BLOCK_K)
    offs_m, offs_n = start_m + tl.arange(0, BLOCK_M), start_n + tl.arange(0, BLOCK_N)
    scale, shift = tl.load(scalars), tl.load(scalars + 1)
    by_row = tl.load(row_lse + offs_m, mask=offs_m < rows, other=0.0)
    if HAS_COLUMNS:
        by_column = tl.load(column_lse + offs_n, mask=offs_n < columns, other=0.0)
        factor = tl.exp2(shift - by_row)[:, None] + tl.exp2(shift - by_column)[None, :]
        tile = tl.exp2(tile * scale - shift) * factor
    else:
        tile = tl.exp2(tile * scale - by_row[:, None])
    if HAS_SMOOTHING:
        tile -= smoothing
    weights.store([start_m, start_n], (tile * STORE_SCALE).to(weights.dtype))


@triton.jit(do_not_specialize=_SIZES)
def safe_softmax_tile(
    q, k, scalars, row_lse, column_lse, weights, rows, columns, width, smoothing,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HAS_SMOOTHING: tl.constexpr,
    STORE_SCALE: tl.constexpr,
):  # fmt: skip
    """If the shift failed: ``softmax_tile`` along rows and columns, with an exp for each.

    This is rare, so a fixed small number of programs loops over all tiles.
    """
    if tl.load(scalars + 3) == 0:
        return
    num_pid_m = tl.cdiv(rows, BLOCK_M)
    for pid in range(tl.program_id(0), num_pid_m * tl.cdiv(columns, BLOCK_N), tl.num_programs(0)):
        start_m, start_n = pid % num_pid_m * BLOCK_M, pid // num_pid_m * BLOCK_N
        tile = _products(q, k, start_m, start_n, width, BLOCK_M, BLOCK_N, BLOCK_K) * tl.load(
            scalars
        )
        offs_m, offs_n = start_m + tl.arange(0, BLOCK_M), start_n + tl.arange(0, BLOCK_N)
        by_row = tl.load(row_lse + offs_m, mask=offs_m < rows, other=0.0)
        by_column = tl.load(column_lse + offs_n, mask=offs_n < columns, other=0.0)
        tile = tl.exp2(tile - by_row[:, None]) + tl.exp2(tile - by_column[None, :])
        if HAS_SMOOTHING:
            tile -= smoothing
        weights.store([start_m, start_n], (tile * STORE_SCALE).to(weights.dtype))


@triton.jit
def _product_minus_one(a, b):
    """(1 + a)(1 + b) - 1, which keeps small a and b that 1 + a would round away."""
    return a + b + a * b


@triton.jit(do_not_specialize=_SIZES)
def sigmoid_tile(
    q, k, scalars, pair_weights, softplus_parts, weight_parts, weights, rows, columns, width, first_pair,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STORE_WEIGHTS: tl.constexpr,
    STORE_SCALE: tl.constexpr,
):  # fmt: skip
    """Sum log2(1 + exp(score)) over a tile without pairs; store the weights times STORE_SCALE, and their sum.

    The logs of four scores are one log of a product. Of a score, what is above MOST is added apart.
    """
    num_pid_m = tl.cdiv(rows, BLOCK_M)
    pid_m, pid_n = tl.program_id(0) % num_pid_m, tl.program_id(0) // num_pid_m
    tile = _products(q, k, pid_m * BLOCK_M, pid_n * BLOCK_N, width, BLOCK_M, BLOCK_N, BLOCK_K)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    tile = tile * tl.load(scalars) + tl.load(scalars + 2)
    has_pairs = _has_pairs(pid_m, pid_n, first_pair, BLOCK_M, BLOCK_N)
    if has_pairs:
        tile = tl.where((offs_m + first_pair)[:, None] == offs_n[None, :], float("-inf"), tile)
    if (pid_m * BLOCK_M + BLOCK_M > rows) | (pid_n * BLOCK_N + BLOCK_N > columns):
        tile += tl.where(offs_m < rows, 0.0, float("-inf"))[:, None]
        tile += tl.where(offs_n < columns, 0.0, float("-inf"))[None, :]
    above = tl.sum(tl.maximum(tile - MOST, 0.0))
    exp = tl.exp2(tl.minimum(tile, MOST, propagate_nan=tl.PropagateNan.ALL))
    product = tl.reduce(tl.reshape(exp, (BLOCK_M, 4, BLOCK_N // 4)), 1, _product_minus_one)
    logs = log2_1p(product, fast_log2(1.0 + product))
    tl.store(softplus_parts + tl.program_id(0), tl.sum(logs) + above)
    if STORE_WEIGHTS:
        tile = exp * fast_reciprocal(1.0 + exp)
        if has_pairs:
            mask = (offs_m < rows) & (offs_m + first_pair < columns)
            at_pairs = tl.load(pair_weights + offs_m, mask=mask, other=0.0)
            tile = tl.where(
                (offs_m + first_pair)[:, None] == offs_n[None, :], at_pairs[:, None], tile
            )
        weights.store([pid_m * BLOCK_M, pid_n * BLOCK_N], (tile * STORE_SCALE).to(weights.dtype))
        tl.store(weight_parts + tl.program_id(0), tl.sum(tile))


@triton.jit
def _dots(a, b, rows, width, a_stride, b_stride, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Dot products of this program's rows of two matrices; zero for rows outside them."""
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
    for start_k in range(0, width, BLOCK_K):
        column = start_k + tl.arange(0, BLOCK_K)[None, :]
        mask = (row < rows) & (column < width)
        left = tl.load(a + row * a_stride + column, mask=mask, other=0.0).to(tl.float32)
        right = tl.load(b + row * b_stride + column, mask=mask, other=0.0).to(tl.float32)
        total += left * right
    return tl.sum(total, 1)


@triton.jit(do_not_specialize=("rows",))
def row_dots(
    a, b, dots, rows, width, a_stride, b_stride, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Dot products of the rows of two matrices, in float32."""
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    values = _dots(a, b, rows, width, a_stride, b_stride, BLOCK_M, BLOCK_K)
    tl.store(dots + offs_m, values, mask=offs_m < rows)


@triton.jit(do_not_specialize=("rows",))
def add_rows(
    a, b, gain, into, dots, rows, width, a_stride, b_stride, into_stride,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``row_dots`` of a and b; in the same pass add ``a * gain`` to ``into``."""
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
    factor = tl.load(gain)
    for start_k in range(0, width, BLOCK_K):
        column = start_k + tl.arange(0, BLOCK_K)[None, :]
        mask = (row < rows) & (column < width)
        left = tl.load(a + row * a_stride + column, mask=mask, other=0.0)
        total += left * tl.load(b + row * b_stride + column, mask=mask, other=0.0).to(tl.float32)
        target = into + row * into_stride + column
        tl.store(target, tl.load(target, mask=mask, other=0.0) + left * factor, mask=mask)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    tl.store(dots + row, tl.sum(total, 1), mask=row < rows)


@triton.jit(do_not_specialize=("rows",))
def max_norms(x, norms, rows, width, stride, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """The largest norm among the rows of each program."""
    squares = _dots(x, x, rows, width, stride, stride, BLOCK_M, BLOCK_K)
    tl.store(norms + tl.program_id(0), tl.sqrt(tl.max(squares)))


@triton.jit
def _maximum(parts, count, BLOCK: tl.constexpr):
    maximum = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, count, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        maximum = tl.maximum(maximum, tl.load(parts + offs, mask=offs < count, other=0.0))
    return tl.max(maximum)


@triton.jit(do_not_specialize=("count_q", "count_k"))
def write_scalars(
    norms_q, norms_k, count_q, count_k, scale, bias, scalars, max_exponent,
    HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write ``scalars``, with a shift that keeps every score - shift (bias excluded) at most ``max_exponent``."""
    factor = tl.load(scale)
    bound = tl.abs(factor) * _maximum(norms_q, count_q, BLOCK) * _maximum(norms_k, count_k, BLOCK)
    tl.store(scalars, factor * LOG2E)
    tl.store(scalars + 1, tl.maximum(bound - max_exponent, 0.0) * LOG2E)
    tl.store(scalars + 2, tl.load(bias) * LOG2E if HAS_BIAS else 0.0)
    tl.store(scalars + 3, 0.0)
