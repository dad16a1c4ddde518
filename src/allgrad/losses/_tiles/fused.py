"""Few launches for batches whose scores fit into memory: one matrix product, then fused kernels.

    forward     dots = q @ k.T                    float32, kept for backward
                rows, columns or sigmoids         the loss and what its gradient needs
    backward    weights                           the derivative by each score, in the features' dtype
                weights @ k, weights.T @ q        float32, then times one number

What can be prepared for sizes is prepared once: the host does little more than launch.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from allgrad.losses._kind import LossKind
from allgrad.losses._tiles import fused_kernels as kernels

if TYPE_CHECKING:
    from torch import Tensor

    from allgrad.losses._tiles.torch import Weights

__all__ = ["RowSums", "column_terms", "dot_products", "products", "row_sums", "sigmoid_term"]

_TILE = {"BLOCK_M": 32, "BLOCK_N": 128, "num_warps": 4}  # of kernels that see a score once
_COLUMNS = {"BLOCK_M": 32, "BLOCK_N": 64, "num_warps": 4}


class _Plan(NamedTuple):
    """Grids and blocks for one number of rows and columns."""

    tiles: tuple[int, int]
    rows: dict[str, int]  # blocks of row_stats
    row_programs: int
    column_programs: int


@lru_cache(maxsize=256)
def _plan(rows: int, columns: int) -> _Plan:
    # A program has whole rows. Few rows each fill the device; more have fewer parts of columns.
    block_m = 16 if rows <= 8192 else 32
    options = {"BLOCK_M": block_m, "BLOCK_N": 256, "num_warps": 8}
    tiles = -(-columns // _TILE["BLOCK_N"]), -(-rows // _TILE["BLOCK_M"])
    return _Plan(tiles, options, -(-rows // block_m), -(-columns // _COLUMNS["BLOCK_N"]))


class RowSums(NamedTuple):
    """What one pass over the scores of a softmax gives."""

    row_lse: Tensor
    pairs: Tensor  # scores
    pair_weights: Tensor
    column_parts: Tensor | None  # the logsumexp of each column over some rows, without pairs
    loss_parts: Tensor  # the terms along rows; room for those along columns behind them


def dot_products(q: Tensor, k: Tensor, out: Tensor | None = None) -> Tensor:
    """``q @ k`` in float32; for float32, with TF32 as torch's own switches say."""
    if q.dtype == torch.float32:
        return torch.mm(q, k, out=out)
    return torch.mm(q, k, out_dtype=torch.float32, out=out)


def row_sums(
    kind: LossKind,
    dots: Tensor,
    scale: Tensor,
    *,
    first_pair: int,
    mean_factor: float,
    smoothing: float,
) -> RowSums:
    rows, columns = dots.shape
    plan = _plan(rows, columns)
    both = kind is LossKind.SOFTMAX_BOTH
    programs = plan.row_programs
    vectors = dots.new_empty(3, rows)
    row_lse, pairs, pair_weights = vectors.unbind()
    column_parts = dots.new_empty(programs, columns) if both else None
    loss_parts = dots.new_empty(programs + plan.column_programs if both else programs)
    kernels.row_stats[(programs,)](
        dots,
        scale,
        row_lse,
        pairs,
        pair_weights,
        dots if column_parts is None else column_parts,
        loss_parts,
        rows,
        columns,
        first_pair,
        mean_factor,
        smoothing,
        smoothing / columns,
        HAS_COLUMNS=both,
        HAS_SMOOTHING=smoothing != 0,
        **plan.rows,
    )
    return RowSums(row_lse, pairs, pair_weights, column_parts, loss_parts)


def column_terms(sums: RowSums, mean_factor: float) -> Tensor:
    """The logsumexp of each column if all rows are here; the terms of the loss go to ``loss_parts``."""
    assert sums.column_parts is not None
    count, columns = sums.column_parts.shape
    column_lse = torch.empty_like(sums.pairs)
    kernels.column_stats[(_plan(columns, columns).column_programs,)](
        sums.column_parts,
        sums.pairs,
        column_lse,
        sums.pair_weights,
        sums.loss_parts[count:],
        columns,
        count,
        mean_factor,
        **_COLUMNS,
    )
    return column_lse


def sigmoid_term(
    dots: Tensor, scale: Tensor, bias: Tensor | None, *, first_pair: int, mean_factor: float
) -> Tensor:
    """The terms of the sigmoid loss, in parts."""
    rows, columns = dots.shape
    grid = _plan(rows, columns).tiles
    parts = dots.new_empty(grid[0] * grid[1])
    kernels.sigmoid_loss[grid](
        dots,
        scale,
        scale if bias is None else bias,
        parts,
        rows,
        columns,
        first_pair,
        mean_factor,
        HAS_BIAS=bias is not None,
        **_TILE,
    )
    return parts


class Products(NamedTuple):
    """The gradients by features, to be multiplied by ``gain``; by scale and bias they are complete."""

    both: Tensor  # of the queries, then of the keys
    gain: Tensor
    by_scale: Tensor
    by_bias: Tensor | None


def products(
    weights: Weights,
    dots: Tensor,
    q: Tensor,
    k: Tensor,
    scale: Tensor,
    *,
    bias: Tensor | None,
    by_loss: Tensor | None,
    first_pair: int,
    mean_factor: float,
    needs_query_grad: bool,
    needs_key_grad: bool,
) -> Products:
    """The products of the weights with the features: not multiplied by ``by_loss`` if it is None."""
    rows, columns = dots.shape
    grid = _plan(rows, columns).tiles
    count, sigmoid = grid[0] * grid[1], weights.kind is LossKind.SIGMOID
    # Weights are at most 2. Stored times 2^14, small ones keep their digits in float16.
    store_scale = 2.0**14 if q.dtype == torch.float16 else 1.0
    by_score = torch.empty_like(dots, dtype=q.dtype)
    numbers = dots.new_empty(1 + (2 * count if sigmoid else count))
    kernels.store_weights[grid](
        dots,
        by_score,
        scale,
        scale if bias is None else bias,
        scale if weights.row_lse is None else weights.row_lse,
        scale if weights.column_lse is None else weights.column_lse,
        scale if sigmoid else weights.pair_weights,
        scale if by_loss is None else by_loss,
        numbers,
        numbers[1:],
        rows,
        columns,
        first_pair,
        mean_factor,
        weights.smoothing,
        IS_SIGMOID=sigmoid,
        HAS_COLUMNS=weights.kind is LossKind.SOFTMAX_BOTH,
        HAS_BIAS=bias is not None,
        HAS_BY_LOSS=by_loss is not None,
        STORE_SCALE=store_scale,
        **_TILE,
    )
    both = dots.new_empty(rows + columns, q.shape[1])
    if needs_query_grad:
        dot_products(by_score, k, out=both[:rows])
    if needs_key_grad:
        dot_products(by_score.T, q, out=both[rows:])
    sums = numbers[1:].view(-1, count).sum(1)
    return Products(both, numbers[0], sums[0], sums[1] if sigmoid else None)
