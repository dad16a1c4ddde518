"""Triton kernels over a stored matrix of dot products: the loss, or the derivative by each score.

Rows are queries, columns are keys; query i and key ``first_pair + i`` are a pair. A score is
``scale * dot + bias``. Scale, bias and the incoming gradient are read from device memory, so that
the host never waits. Inside, exponentials and logarithms are to base 2; what is stored is natural.

Sums over many programs are stored as one part per program: a sum of the parts has a fixed order,
which atomic additions have not.
"""

# mypy: ignore-errors
# ruff: noqa: N803, PLR0917
from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["column_stats", "row_stats", "sigmoid_loss", "store_weights"]

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# Sizes that change from batch to batch must not trigger a compilation, except whether the rows of
# the matrix are aligned.
_SIZES = ("rows", "first_pair", "count")
_VECTORS = (
    *("row_lse", "column_lse", "pair_scores", "pair_weights", "column_parts", "loss_parts"),
    *("scale", "bias", "by_loss", "gain", "parts"),
)


@triton.jit
def _log2_1p(x):
    """log2(1 + x) for x from 0 to 1; 1 + x rounds a small x away, three terms of the series keep it."""
    series = x * (1.0 - x * (0.5 - x * 0.3333333333)) * LOG2E
    return tl.where(x < 0.01, series, tl.log2(1.0 + x))


@triton.jit
def _softplus2(x):
    """log2(1 + 2^x)."""
    return tl.maximum(x, 0.0) + _log2_1p(tl.exp2(-tl.abs(x)))


@triton.jit
def _sigmoid2(x):
    """1 / (1 + 2^-x)."""
    small = tl.exp2(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def _finite(top):
    """Replace a maximum of -inf, that of a row of nothing but a pair: -inf - -inf would be NaN."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_VECTORS)
def row_stats(
    dots, scale, row_lse, pair_scores, pair_weights, column_parts, loss_parts,
    rows, columns, first_pair, mean_factor, smoothing, smoothing_each,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_COLUMNS: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
):  # fmt: skip
    """Of each row: the logsumexp, the pair's score and weight, and its terms of the loss.

    ``column_parts`` gets the logsumexp of each column over this program's rows, without pairs.
    """
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = offs_m < rows
    factor = tl.load(scale) * LOG2E
    lines = dots + offs_m.to(tl.int64)[:, None] * columns
    own = dots + offs_m.to(tl.int64) * columns + first_pair + offs_m
    pair = tl.load(own, mask=is_row, other=0.0) * factor
    top = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    plain = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for start in range(0, columns, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        mask = is_row[:, None] & (offs_n < columns)[None, :]
        tile = tl.load(lines + offs_n[None, :], mask=mask, other=0.0) * factor
        if HAS_SMOOTHING:
            plain += tl.sum(tile, 1)
        mask = mask & ((offs_m + first_pair)[:, None] != offs_n[None, :])
        tile = tl.where(mask, tile, float("-inf"))
        higher = tl.maximum(top, tl.max(tile, 1))
        shift = _finite(higher)
        total = total * tl.exp2(top - shift) + tl.sum(tl.exp2(tile - shift[:, None]), 1)
        top = higher
        if HAS_COLUMNS:
            shift = _finite(tl.max(tile, 0))
            sums = tl.sum(tl.exp2(tile - shift[None, :]), 0)
            target = column_parts + tl.program_id(0).to(tl.int64) * columns + offs_n
            tl.store(target, (shift + tl.log2(sums)) * LN2, mask=offs_n < columns)
    negatives = _finite(top) + tl.log2(total)
    difference = negatives - pair
    loss = _softplus2(difference)
    lse = pair + loss
    weight = smoothing - _sigmoid2(difference)
    if HAS_SMOOTHING:
        loss += smoothing * pair - smoothing_each * plain
    tl.store(row_lse + offs_m, lse * LN2, mask=is_row)
    tl.store(pair_scores + offs_m, pair * LN2, mask=is_row)
    tl.store(pair_weights + offs_m, weight, mask=is_row)
    loss = tl.sum(tl.where(is_row, loss, 0.0))
    tl.store(loss_parts + tl.program_id(0), loss * LN2 * mean_factor)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_VECTORS)
def column_stats(
    column_parts, pair_scores, column_lse, pair_weights, loss_parts, columns, count, mean_factor,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Of each column, if all rows are here and row i is its pair: what ``row_stats`` gives of rows."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = offs_n < columns
    top = tl.full((BLOCK_N,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for start in range(0, count, BLOCK_M):
        offs_m = start + tl.arange(0, BLOCK_M)
        mask = (offs_m < count)[:, None] & is_column[None, :]
        source = column_parts + offs_m.to(tl.int64)[:, None] * columns + offs_n[None, :]
        tile = tl.load(source, mask=mask, other=float("-inf")) * LOG2E
        higher = tl.maximum(top, tl.max(tile, 0))
        shift = _finite(higher)
        total = total * tl.exp2(top - shift) + tl.sum(tl.exp2(tile - shift[None, :]), 0)
        top = higher
    pair = tl.load(pair_scores + offs_n, mask=is_column, other=0.0) * LOG2E
    difference = _finite(top) + tl.log2(total) - pair
    loss = _softplus2(difference)
    tl.store(column_lse + offs_n, (pair + loss) * LN2, mask=is_column)
    weight = tl.load(pair_weights + offs_n, mask=is_column, other=0.0) - _sigmoid2(difference)
    tl.store(pair_weights + offs_n, weight, mask=is_column)
    loss = tl.sum(tl.where(is_column, loss, 0.0))
    tl.store(loss_parts + tl.program_id(0), loss * LN2 * mean_factor)


@triton.jit
def _tile(dots, rows, columns, first_pair, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """This program's tile: offsets, mask, where the pairs are, and the dot products."""
    offs_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (offs_m < rows)[:, None] & (offs_n < columns)[None, :]
    is_pair = (offs_m + first_pair)[:, None] == offs_n[None, :]
    place = offs_m.to(tl.int64)[:, None] * columns + offs_n[None, :]
    return offs_m, offs_n, mask, is_pair, place, tl.load(dots + place, mask=mask, other=0.0)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_VECTORS)
def sigmoid_loss(
    dots, scale, bias, loss_parts, rows, columns, first_pair, mean_factor,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Sum the terms of the loss over a tile: log(1 + exp(score)), at pairs log(1 + exp(-score))."""
    _, _, mask, is_pair, _, tile = _tile(dots, rows, columns, first_pair, BLOCK_M, BLOCK_N)
    tile *= tl.load(scale) * LOG2E
    if HAS_BIAS:
        tile += tl.load(bias) * LOG2E
    tile = tl.where(is_pair, -tile, tile)
    total = tl.sum(_softplus2(tl.where(mask, tile, float("-inf"))))
    part = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.store(loss_parts + part, total * LN2 * mean_factor)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_VECTORS)
def store_weights(
    dots, weights, scale, bias, row_lse, column_lse, pair_weights, by_loss, gain, parts,
    rows, columns, first_pair, mean_factor, smoothing_each,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, IS_SIGMOID: tl.constexpr,
    HAS_COLUMNS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_BY_LOSS: tl.constexpr,
    STORE_SCALE: tl.constexpr,
):  # fmt: skip
    """Store the derivative of the loss by each score of a tile, times STORE_SCALE.

    ``parts`` gets the sums over the tile of weight times dot product, for the gradient of the scale,
    and of the weights, for that of the bias; ``gain`` what the products with the weights must be
    multiplied by.
    """
    offs_m, offs_n, mask, is_pair, place, tile = _tile(
        dots, rows, columns, first_pair, BLOCK_M, BLOCK_N
    )
    factor = tl.load(scale)
    scores = tile * (factor * LOG2E)
    if IS_SIGMOID:
        if HAS_BIAS:
            scores += tl.load(bias) * LOG2E
        scores = tl.where(is_pair, -scores, scores)
        weight = _sigmoid2(scores)
        weight = tl.where(is_pair, -weight, weight)
    else:
        by_row = tl.load(row_lse + offs_m, mask=offs_m < rows, other=0.0) * LOG2E
        weight = tl.exp2(scores - by_row[:, None])
        if HAS_COLUMNS:
            by_column = tl.load(column_lse + offs_n, mask=offs_n < columns, other=0.0) * LOG2E
            weight += tl.exp2(scores - by_column[None, :])
        at_pairs = tl.load(pair_weights + offs_m, mask=offs_m < rows, other=0.0)
        weight = tl.where(is_pair, at_pairs[:, None], weight - smoothing_each)
    weight = tl.where(mask, weight, 0.0)
    tl.store(weights + place, (weight * STORE_SCALE).to(weights.dtype.element_ty), mask=mask)
    common = mean_factor
    if HAS_BY_LOSS:
        common = tl.load(by_loss) * mean_factor
    part = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.store(parts + part, tl.sum(weight * tile) * common)
    if IS_SIGMOID:
        count = tl.num_programs(0) * tl.num_programs(1)
        tl.store(parts + count + part, tl.sum(weight) * common)
    if part == 0:
        tl.store(gain, common * factor / STORE_SCALE)
