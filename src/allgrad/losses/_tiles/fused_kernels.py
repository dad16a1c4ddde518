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

from allgrad.losses._tiles.kernel_math import (
    LN2,
    LOG2E,
    fast_log2,
    fast_reciprocal,
    finite,
    log2_1p,
    sigmoid2,
    softplus2,
)

__all__ = [
    "copy_inputs",
    "gradients",
    "sigmoid_weights",
    "softmax_terms",
    "softmax_weights",
    "sums",
    "tile_lse",
]

# Sizes that change from batch to batch must not trigger a compilation, except whether the rows of
# the matrix are aligned.
_SIZES = (
    *("rows", "first_pair", "row_count", "column_count"),
    *("count", "loss_count", "query_elements", "key_elements", "elements", "loss_address"),
)
_VECTORS = (
    *("row_lse", "column_lse", "pair_scores", "pair_weights", "row_parts", "column_parts"),
    *("scale", "bias", "by_loss", "loss_parts", "parts", "loss", "numbers"),
    *("by_scale", "by_bias", "to_scale", "to_bias", "to_address"),
)


@triton.jit
def _tile(dots, rows, columns, first_pair, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The tile of a program: offsets, mask, where the pairs are, and the dot products."""
    offs_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (offs_m < rows)[:, None] & (offs_n < columns)[None, :]
    is_pair = (offs_m + first_pair)[:, None] == offs_n[None, :]
    place = offs_m.to(tl.int64)[:, None] * columns + offs_n[None, :]
    return offs_m, offs_n, mask, is_pair, place, tl.load(dots + place, mask=mask, other=0.0)


@triton.jit
def _lse(tile, axis: tl.constexpr):
    shift = finite(tl.max(tile, axis))
    sums = tl.sum(tl.exp2(tile - tl.expand_dims(shift, axis)), axis)
    return (shift + tl.log2(sums)) * LN2


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_VECTORS)
def tile_lse(
    dots, scale, row_parts, column_parts, rows, columns, first_pair,
    HAS_COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The logsumexp of each row and each column of a tile, without pairs."""
    offs_m, offs_n, mask, is_pair, _, tile = _tile(
        dots, rows, columns, first_pair, BLOCK_M, BLOCK_N
    )
    tile = tl.where(mask & ~is_pair, tile * (tl.load(scale) * LOG2E), float("-inf"))
    target = row_parts + tl.program_id(0).to(tl.int64) * rows + offs_m
    tl.store(target, _lse(tile, 1), mask=offs_m < rows)
    if HAS_COLUMNS:
        target = column_parts + tl.program_id(1).to(tl.int64) * columns + offs_n
        tl.store(target, _lse(tile, 0), mask=offs_n < columns)


@triton.jit
def _combined(parts, count, offs, length, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    """The logsumexp of ``count`` parts, to base 2."""
    top = tl.full((BLOCK_N,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for start in range(0, count, BLOCK_P):
        offs_p = start + tl.arange(0, BLOCK_P)
        mask = (offs_p < count)[:, None] & (offs < length)[None, :]
        source = parts + offs_p.to(tl.int64)[:, None] * length + offs[None, :]
        tile = tl.load(source, mask=mask, other=float("-inf")) * LOG2E
        higher = tl.maximum(top, tl.max(tile, 0))
        shift = finite(higher)
        total = total * tl.exp2(top - shift) + tl.sum(tl.exp2(tile - shift[None, :]), 0)
        top = higher
    return finite(top) + tl.log2(total)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_VECTORS)
def softmax_terms(
    q, k, scale, row_parts, column_parts, row_lse, column_lse, pair_scores, pair_weights, loss_parts,
    rows, columns, width, first_pair, row_count, column_count, mean_factor, smoothing,
    HAS_COLUMNS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Of some rows: the logsumexp, the pair's score and weight, the terms of the loss.

    With HAS_COLUMNS all rows are here, column i is the pair of row i, and its terms are added.
    """
    offs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = offs < rows
    # Tensor cores cut off digits of a sum that a small loss needs of the score of its pair.
    row = offs.to(tl.int64)[:, None]
    pair = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for start in range(0, width, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)[None, :]
        inside = mask[:, None] & (column < width)
        left = tl.load(q + row * width + column, mask=inside, other=0.0).to(tl.float32)
        right = tl.load(k + (row + first_pair) * width + column, mask=inside, other=0.0)
        pair += tl.sum(left * right.to(tl.float32), 1)
    pair *= tl.load(scale) * LOG2E
    difference = _combined(row_parts, row_count, offs, rows, BLOCK_P, BLOCK_N) - pair
    loss = softplus2(difference)
    weight = smoothing - sigmoid2(difference)
    tl.store(row_lse + offs, (pair + loss) * LN2, mask=mask)
    if HAS_COLUMNS:
        negatives = _combined(column_parts, column_count, offs, columns, BLOCK_P, BLOCK_N)
        difference = negatives - pair
        of_column = softplus2(difference)
        weight -= sigmoid2(difference)
        tl.store(column_lse + offs, (pair + of_column) * LN2, mask=mask)
        loss += of_column
    tl.store(pair_scores + offs, pair * LN2, mask=mask)
    tl.store(pair_weights + offs, weight, mask=mask)
    loss = tl.sum(tl.where(mask, loss, 0.0))
    tl.store(loss_parts + tl.program_id(0), loss * LN2 * mean_factor)


@triton.jit
def _sum(parts, count, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, count, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        total += tl.load(parts + offs, mask=offs < count, other=0.0)
    return tl.sum(total)


@triton.jit
def _store_loss(loss, value, IS_ADDRESS: tl.constexpr):
    """With IS_ADDRESS, ``loss`` holds the address of the loss."""
    if IS_ADDRESS:
        tl.store(tl.load(loss).to(tl.pointer_type(tl.float32)), value)
    else:
        tl.store(loss, value)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_VECTORS)
def softmax_weights(
    dots, weights, scale, row_lse, column_lse, pair_weights, by_loss, parts, loss_parts, loss,
    rows, columns, first_pair, loss_count, mean_factor, smoothing_each,
    HAS_COLUMNS: tl.constexpr, HAS_BY_LOSS: tl.constexpr, HAS_LOSS: tl.constexpr,
    IS_ADDRESS: tl.constexpr, STORE_SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store the derivative of the loss by each score of a tile, times STORE_SCALE.

    ``parts`` gets the sum over the tile of weight times dot product, for the gradient of the scale.
    With HAS_LOSS one program also sums the loss, which saves a launch; without it, ``parts`` gets in
    one more place what the products with the weights must be multiplied by.
    """
    offs_m, offs_n, mask, is_pair, place, tile = _tile(
        dots, rows, columns, first_pair, BLOCK_M, BLOCK_N
    )
    factor = tl.load(scale)
    scores = tile * (factor * LOG2E)
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
    if HAS_LOSS:
        if part == 0:
            _store_loss(loss, _sum(loss_parts, loss_count, BLOCK_M * BLOCK_N // 4), IS_ADDRESS)
    else:
        count = tl.num_programs(0) * tl.num_programs(1)
        tl.store(parts + count + part, tl.where(part == 0, common * factor / STORE_SCALE, 0.0))


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_VECTORS)
def sigmoid_weights(
    dots, weights, scale, bias, parts, rows, columns, first_pair, mean_factor,
    HAS_BIAS: tl.constexpr, HAS_WEIGHTS: tl.constexpr, STORE_SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sum the terms of the loss over a tile: log(1 + exp(score)), at pairs log(1 + exp(-score)).

    With HAS_WEIGHTS, the same as ``softmax_weights`` too; its numbers follow in ``parts``: those of
    the scale, of the bias, and of the products.
    """
    _, _, mask, is_pair, place, tile = _tile(dots, rows, columns, first_pair, BLOCK_M, BLOCK_N)
    factor = tl.load(scale)
    scores = tile * (factor * LOG2E)
    if HAS_BIAS:
        scores += tl.load(bias) * LOG2E
    scores = tl.where(is_pair, -scores, scores)
    small = tl.exp2(-tl.abs(scores))
    terms = tl.maximum(scores, 0.0) + log2_1p(small, fast_log2(1.0 + small))
    terms = tl.sum(tl.where(mask, terms, 0.0))
    part = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.store(parts + part, terms * LN2 * mean_factor)
    if HAS_WEIGHTS:
        weight = tl.where(scores >= 0, 1.0, small) * fast_reciprocal(1.0 + small)
        weight = tl.where(mask, tl.where(is_pair, -weight, weight), 0.0)
        tl.store(weights + place, (weight * STORE_SCALE).to(weights.dtype.element_ty), mask=mask)
        count = tl.num_programs(0) * tl.num_programs(1)
        tl.store(parts + count + part, tl.sum(weight * tile) * mean_factor)
        tl.store(parts + 2 * count + part, tl.sum(weight) * mean_factor)
        gain = tl.where(part == 0, mean_factor * factor / STORE_SCALE, 0.0)
        tl.store(parts + 3 * count + part, gain)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_VECTORS)
def sums(parts, loss, numbers, count, IS_ADDRESS: tl.constexpr, BLOCK: tl.constexpr):
    """The sums of the first rows of ``parts``, one for each program: the loss, then ``numbers``."""
    index = tl.program_id(0)
    total = _sum(parts + index * count, count, BLOCK)
    if index == 0:
        _store_loss(loss, total, IS_ADDRESS)
    else:
        tl.store(numbers + index - 1, total)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_VECTORS)
def gradients(
    query_products, key_products, parts, scale, by_loss, by_query, by_key, by_scale, by_bias,
    query_elements, key_elements, count, mean_factor,
    HAS_BIAS: tl.constexpr, STORE_SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """All gradients: the products with the weights times one number, rounded once.

    The first programs have the queries, the others the keys. ``parts`` are those of the gradient by
    the scale; with HAS_BIAS there is one, and then the gradient by the bias.
    """
    pid, query_programs = tl.program_id(0).to(tl.int64), tl.cdiv(query_elements, BLOCK)
    weight = tl.load(by_loss)
    gain = weight * tl.load(scale) * (mean_factor / STORE_SCALE)
    offs = tl.arange(0, BLOCK)
    if pid < query_programs:
        place = pid * BLOCK + offs
        mask = place < query_elements
        values = tl.load(query_products + place, mask=mask) * gain
        tl.store(by_query + place, values.to(by_query.dtype.element_ty), mask=mask)
    else:
        place = (pid - query_programs) * BLOCK + offs
        mask = place < key_elements
        values = tl.load(key_products + place, mask=mask) * gain
        tl.store(by_key + place, values.to(by_key.dtype.element_ty), mask=mask)
    if pid == 0:
        tl.store(by_scale, _sum(parts, count, BLOCK) * weight)
        if HAS_BIAS:
            tl.store(by_bias, tl.load(parts + 1) * weight)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_VECTORS)
def copy_inputs(
    q, k, scale, bias, to_q, to_k, to_scale, to_bias, to_address, elements, loss_address,
    HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy all inputs of a loss, and the address at which its value is wanted."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < elements
    left, right = tl.load(q + place, mask=mask), tl.load(k + place, mask=mask)
    tl.store(to_q + place, left, mask=mask)
    tl.store(to_k + place, right, mask=mask)
    if tl.program_id(0) == 0:
        tl.store(to_scale, tl.load(scale))
        if HAS_BIAS:
            tl.store(to_bias, tl.load(bias))
        tl.store(to_address, loss_address.to(tl.int64))
