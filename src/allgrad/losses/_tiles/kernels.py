"""Triton kernels over tiles of scores: a matrix product, with what is needed of it in the epilogue.

A program computes one tile, or some in turns. Rows are those of a panel of queries, columns all keys.
Numbers come in memory, not as arguments, so that nothing waits for the device:

    facts   [ scale * log2(e), shift * log2(e), bias * log2(e), whether the shift fails ]

Exponentials are powers of two. A tile at the edge reads zeros where there are no features; what
comes of them is left out of the sums and of the result.
"""

# mypy: ignore-errors
# ruff: noqa: N803, PLR0917
from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "add_rows",
    "find_facts",
    "find_longest",
    "join_logs",
    "row_dots",
    "sigmoid_tile",
    "softmax_tile",
    "softmax_tile_of_any_range",
    "sums_tile",
    "sums_tile_of_any_range",
    "sums_tile_of_pairs",
]

LOG2E = tl.constexpr(1.4426950408889634)
# A batch of another size is no reason to compile again.
_SIZES = ("rows", "columns", "width", "first_pair", "count", "length")


@triton.jit
def _products(q, k, row, column, width, TALL: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr):
    tile = tl.zeros((TALL, WIDE), dtype=tl.float32)
    for at in range(0, width, DEEP):
        tile = tl.dot(q.load([row, at]), k.load([column, at]).T, tile)
    return tile


@triton.jit
def _has_pairs(down, across, first_pair, TALL: tl.constexpr, WIDE: tl.constexpr):
    start = first_pair + down * TALL - across * WIDE
    return (start < WIDE) & (start + TALL > 0)


@triton.jit
def _sums(
    q, k, facts, by_row, by_column, rows, columns, width, first_pair, down, across,
    TALL: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr, COLUMNS: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    tile = _products(q, k, down * TALL, across * WIDE, width, TALL, WIDE, DEEP)
    row = down * TALL + tl.arange(0, TALL)
    column = across * WIDE + tl.arange(0, WIDE)
    shift = tl.where(column < columns, -tl.load(facts + 1), float("-inf"))
    tile = tl.exp2(tile * tl.load(facts) + shift[None, :])
    if PAIRS:
        tile = tl.where((row + first_pair)[:, None] == column[None, :], 0.0, tile)
    tl.store(by_row + across * rows + row, tl.sum(tile, 1), mask=row < rows)
    if COLUMNS:
        if down * TALL + TALL > rows:
            tile = tl.where((row < rows)[:, None], tile, 0.0)
        tl.store(by_column + down * columns + column, tl.sum(tile, 0), mask=column < columns)


@triton.jit(do_not_specialize=_SIZES)
def sums_tile(
    q, k, facts, by_row, by_column, rows, columns, width, first_pair,
    TALL: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sums of exp(score - shift) along the rows and the columns of a tile, one exp for both."""
    high = tl.cdiv(rows, TALL)
    down, across = tl.program_id(0) % high, tl.program_id(0) // high
    _sums(q, k, facts, by_row, by_column, rows, columns, width, first_pair, down, across,
          TALL, WIDE, DEEP, COLUMNS, False)  # fmt: skip


@triton.jit(do_not_specialize=_SIZES)
def sums_tile_of_pairs(
    q, k, facts, by_row, by_column, rows, columns, width, first_pair,
    TALL: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr, COLUMNS: tl.constexpr,
    CROSSED: tl.constexpr,
):  # fmt: skip
    """The same but for pairs, of the tiles that have some: at most CROSSED for each tile of rows.

    With the pairs in mind ``sums_tile`` would need more registers, and fewer of it would run at once.
    """
    down = tl.program_id(0) // CROSSED
    across = (first_pair + down * TALL) // WIDE + tl.program_id(0) % CROSSED
    if _has_pairs(down, across, first_pair, TALL, WIDE) & (across * WIDE < columns):
        _sums(q, k, facts, by_row, by_column, rows, columns, width, first_pair, down, across,
              TALL, WIDE, DEEP, COLUMNS, True)  # fmt: skip


@triton.jit
def _finite(top):
    """Nothing but a pair has no highest score, and infinity less infinity is no number."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit(do_not_specialize=_SIZES)
def sums_tile_of_any_range(
    q, k, facts, by_row, by_column, rows, columns, width, first_pair,
    TALL: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Logs (to base 2) of such sums but for pairs without a shift, for scores too far apart; else nothing.

    As it seldom has anything to do, few programs take all tiles in turns.
    """
    if tl.load(facts + 3) == 0:
        return
    high = tl.cdiv(rows, TALL)
    for number in range(tl.program_id(0), high * tl.cdiv(columns, WIDE), tl.num_programs(0)):
        down, across = number % high, number // high
        tile = _products(q, k, down * TALL, across * WIDE, width, TALL, WIDE, DEEP)
        row = down * TALL + tl.arange(0, TALL)
        column = across * WIDE + tl.arange(0, WIDE)
        there = (row < rows)[:, None] & (column < columns)[None, :]
        there &= (row + first_pair)[:, None] != column[None, :]
        tile = tl.where(there, tile * tl.load(facts), float("-inf"))
        top = _finite(tl.max(tile, 1))
        sums = tl.sum(tl.exp2(tile - top[:, None]), 1)
        tl.store(by_row + across * rows + row, top + tl.log2(sums), mask=row < rows)
        if COLUMNS:
            top = _finite(tl.max(tile, 0))
            sums = tl.sum(tl.exp2(tile - top[None, :]), 0)
            at = by_column + down * columns + column
            tl.store(at, top + tl.log2(sums), mask=column < columns)


@triton.jit(do_not_specialize=_SIZES)
def join_logs(parts, logs, facts, count, length, SMALL: tl.constexpr):
    """Join logs (to base 2) of sums to those of the sum of them, if the shift failed."""
    if tl.load(facts + 3) == 0:
        return
    at = tl.program_id(0) * SMALL + tl.arange(0, SMALL)
    joined = tl.load(logs + at, mask=at < length, other=0.0)
    for number in range(count):
        part = tl.load(parts + number * length + at, mask=at < length, other=0.0)
        top = _finite(tl.maximum(joined, part))
        joined = top + tl.log2(tl.exp2(joined - top) + tl.exp2(part - top))
    tl.store(logs + at, joined, mask=at < length)


@triton.jit(do_not_specialize=_SIZES)
def softmax_tile(
    q, k, facts, row_lse, column_lse, weights, rows, columns, width, everywhere,
    TALL: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr, COLUMNS: tl.constexpr,
    SMOOTHED: tl.constexpr, LIFT: tl.constexpr,
):  # fmt: skip
    """Weights of a tile of scores, from logs of sums to base 2, times LIFT; not those of pairs.

    Nothing, if both rows and columns count and the shift failed. With that case and the pairs in
    mind it would need more registers, and fewer of it would run at once.
    """
    if COLUMNS:  # noqa: SIM102  known when compiled, unlike the next
        if tl.load(facts + 3) != 0:
            return
    high = tl.cdiv(rows, TALL)
    row, column = tl.program_id(0) % high * TALL, tl.program_id(0) // high * WIDE
    tile = _products(q, k, row, column, width, TALL, WIDE, DEEP)
    at_row, at_column = row + tl.arange(0, TALL), column + tl.arange(0, WIDE)
    scale, shift = tl.load(facts), tl.load(facts + 1)
    by_row = tl.load(row_lse + at_row, mask=at_row < rows, other=0.0)
    if COLUMNS:
        by_column = tl.load(column_lse + at_column, mask=at_column < columns, other=0.0)
        factor = tl.exp2(shift - by_row)[:, None] + tl.exp2(shift - by_column)[None, :]
        tile = tl.exp2(tile * scale - shift) * factor
    else:
        tile = tl.exp2(tile * scale - by_row[:, None])
    if SMOOTHED:
        tile -= everywhere
    weights.store([row, column], (tile * LIFT).to(weights.dtype))


@triton.jit(do_not_specialize=_SIZES)
def softmax_tile_of_any_range(
    q, k, facts, row_lse, column_lse, weights, rows, columns, width, everywhere,
    TALL: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr, SMOOTHED: tl.constexpr,
    LIFT: tl.constexpr,
):  # fmt: skip
    """The same without a shift, if it failed; else nothing. Few programs take all tiles in turns."""
    if tl.load(facts + 3) == 0:
        return
    high = tl.cdiv(rows, TALL)
    for number in range(tl.program_id(0), high * tl.cdiv(columns, WIDE), tl.num_programs(0)):
        row, column = number % high * TALL, number // high * WIDE
        tile = _products(q, k, row, column, width, TALL, WIDE, DEEP) * tl.load(facts)
        at_row, at_column = row + tl.arange(0, TALL), column + tl.arange(0, WIDE)
        by_row = tl.load(row_lse + at_row, mask=at_row < rows, other=0.0)
        by_column = tl.load(column_lse + at_column, mask=at_column < columns, other=0.0)
        tile = tl.exp2(tile - by_row[:, None]) + tl.exp2(tile - by_column[None, :])
        if SMOOTHED:
            tile -= everywhere
        weights.store([row, column], (tile * LIFT).to(weights.dtype))


@triton.jit
def _grown(a, b):
    """(1 + a)(1 + b) - 1, where small numbers are not lost beside the 1."""
    return a + b + a * b


@triton.jit
def _reciprocal(x):
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit(do_not_specialize=_SIZES)
def sigmoid_tile(
    q, k, facts, pairs, softplus, total, weights, rows, columns, width, first_pair,
    TALL: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr, STORE: tl.constexpr,
    LIFT: tl.constexpr,
):  # fmt: skip
    """Sums of log2(1 + exp(score)) but for pairs and of the weights, and the weights times LIFT.

    The sum of logs is the log of a product: one for each 16 scores, those that one thread holds.
    """
    high = tl.cdiv(rows, TALL)
    down, across = tl.program_id(0) % high, tl.program_id(0) // high
    tile = _products(q, k, down * TALL, across * WIDE, width, TALL, WIDE, DEEP)
    row = down * TALL + tl.arange(0, TALL)
    column = across * WIDE + tl.arange(0, WIDE)
    tile = tile * tl.load(facts) + tl.load(facts + 2)
    has_pairs = _has_pairs(down, across, first_pair, TALL, WIDE)
    if has_pairs:
        tile = tl.where((row + first_pair)[:, None] == column[None, :], float("-inf"), tile)
    if (down * TALL + TALL > rows) | (across * WIDE + WIDE > columns):
        tile += tl.where(row < rows, 0.0, float("-inf"))[:, None]
        tile += tl.where(column < columns, 0.0, float("-inf"))[None, :]
    small = tl.exp2(-tl.abs(tile))
    grown = tl.reduce(tl.reshape(small, (TALL, WIDE // 8, 8)), 1, _grown)
    # 1 + x loses a small x to rounding; three terms of the series of its log do not.
    series = grown * (1.0 - grown * (0.5 - grown * 0.3333333333)) * LOG2E
    logs = tl.where(grown < 0.01, series, tl.log2(1.0 + grown))
    tl.store(softplus + tl.program_id(0), tl.sum(logs) + tl.sum(tl.maximum(tile, 0.0)))
    if STORE:
        tile = tl.where(tile < 0.0, small, 1.0) * _reciprocal(1.0 + small)
        if has_pairs:
            inside = (row < rows) & (row + first_pair < columns)
            at_pair = tl.load(pairs + row, mask=inside, other=0.0)
            tile = tl.where((row + first_pair)[:, None] == column[None, :], at_pair[:, None], tile)
        weights.store([down * TALL, across * WIDE], (tile * LIFT).to(weights.dtype))
        tl.store(total + tl.program_id(0), tl.sum(tile))


@triton.jit
def _dots(a, b, rows, width, a_stride, b_stride, TALL: tl.constexpr, DEEP: tl.constexpr):
    """The products of a program's rows of two matrices; zero for rows that are not there."""
    row = (tl.program_id(0) * TALL + tl.arange(0, TALL)).to(tl.int64)[:, None]
    total = tl.zeros((TALL, DEEP), dtype=tl.float32)
    for at in range(0, width, DEEP):
        column = at + tl.arange(0, DEEP)[None, :]
        there = (row < rows) & (column < width)
        left = tl.load(a + row * a_stride + column, mask=there, other=0.0).to(tl.float32)
        right = tl.load(b + row * b_stride + column, mask=there, other=0.0).to(tl.float32)
        total += left * right
    return tl.sum(total, 1)


@triton.jit(do_not_specialize=("rows",))
def row_dots(a, b, dots, rows, width, a_stride, b_stride, TALL: tl.constexpr, DEEP: tl.constexpr):
    """The products of rows of two matrices, in float32."""
    row = tl.program_id(0) * TALL + tl.arange(0, TALL)
    found = _dots(a, b, rows, width, a_stride, b_stride, TALL, DEEP)
    tl.store(dots + row, found, mask=row < rows)


@triton.jit(do_not_specialize=("rows",))
def add_rows(
    a, b, gain, into, dots, rows, width, a_stride, b_stride, into_stride,
    TALL: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """The same, and ``a`` times ``gain`` is added to ``into``."""
    row = (tl.program_id(0) * TALL + tl.arange(0, TALL)).to(tl.int64)[:, None]
    total = tl.zeros((TALL, DEEP), dtype=tl.float32)
    factor = tl.load(gain)
    for at in range(0, width, DEEP):
        column = at + tl.arange(0, DEEP)[None, :]
        there = (row < rows) & (column < width)
        left = tl.load(a + row * a_stride + column, mask=there, other=0.0)
        total += left * tl.load(b + row * b_stride + column, mask=there, other=0.0).to(tl.float32)
        target = into + row * into_stride + column
        tl.store(target, tl.load(target, mask=there, other=0.0) + left * factor, mask=there)
    row = tl.program_id(0) * TALL + tl.arange(0, TALL)
    tl.store(dots + row, tl.sum(total, 1), mask=row < rows)


@triton.jit(do_not_specialize=("rows",))
def find_longest(x, longest, rows, width, stride, TALL: tl.constexpr, DEEP: tl.constexpr):
    """The largest norm among a program's rows."""
    squares = _dots(x, x, rows, width, stride, stride, TALL, DEEP)
    tl.store(longest + tl.program_id(0), tl.sqrt(tl.max(squares)))


@triton.jit
def _largest(parts, count, SMALL: tl.constexpr):
    largest = tl.zeros((SMALL,), dtype=tl.float32)
    for start in range(0, count, SMALL):
        at = start + tl.arange(0, SMALL)
        largest = tl.maximum(largest, tl.load(parts + at, mask=at < count, other=0.0))
    return tl.max(largest)


@triton.jit(do_not_specialize=("count_q", "count_k"))
def find_facts(
    longest_q, longest_k, count_q, count_k, scale, bias, facts, highest,
    BIASED: tl.constexpr, SMALL: tl.constexpr,
):  # fmt: skip
    """The facts, with no failure yet; less the shift no score but for the bias is above ``highest``."""
    factor = tl.load(scale)
    bound = (
        tl.abs(factor) * _largest(longest_q, count_q, SMALL) * _largest(longest_k, count_k, SMALL)
    )
    tl.store(facts, factor * LOG2E)
    tl.store(facts + 1, tl.maximum(bound - highest, 0.0) * LOG2E)
    tl.store(facts + 2, tl.load(bias) * LOG2E if BIASED else 0.0)
    tl.store(facts + 3, 0.0)
