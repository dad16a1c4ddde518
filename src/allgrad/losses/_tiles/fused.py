"""Few launches for batches whose scores fit into memory: one matrix product, then fused kernels.

    forward     dots = q @ k.T                    float32
                softmax: sums of tiles, terms     the loss, and what its gradient needs
                sigmoid: terms and weights        the loss, and the derivative by each score
    backward    softmax: weights                  the derivative by each score, in the features' dtype
                weights @ k, weights.T @ q        float32, then times one number

What can be prepared for sizes is prepared once: the host does little more than launch.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from allgrad.losses._kind import LossKind
from allgrad.losses._tiles import fused_kernels as kernels
from allgrad.losses._tiles.float32_dots import dots_of_parts, in_parts
from allgrad.losses._tiles.launches import launch

if TYPE_CHECKING:
    from torch import Tensor

    from allgrad.losses._tiles.torch import Weights

__all__ = [
    "dot_products",
    "products",
    "score_products",
    "sigmoid_terms",
    "softmax_terms",
    "softmax_weights",
    "tile_lse",
]

LSE_TILE, TILE, TERMS = (64, 128), (32, 128), (32, 32, 128)


class Plan(NamedTuple):
    """Grids for one number of rows and columns."""

    lse_tiles: tuple[int, int, int]
    tiles: tuple[int, int, int]
    terms: tuple[int, int, int]
    alignment: int  # of what Triton compiles kernels for


@lru_cache(maxsize=256)
def _plan(rows: int, columns: int) -> Plan:
    def tiles(block_m: int, block_n: int) -> tuple[int, int, int]:
        return -(-columns // block_n), -(-rows // block_m), 1

    terms = -(-rows // TERMS[1]), 1, 1
    return Plan(tiles(*LSE_TILE), tiles(*TILE), terms, _alignment(columns))


def _alignment(length: int) -> int:
    """Of a row of this length: Triton compiles a kernel for each."""
    return 1 if length == 1 else 16 if length % 16 == 0 else 2


def store_scale(dtype: torch.dtype) -> int:
    # Weights are at most 2. Stored times 2^14, small ones keep their digits in float16.
    return 2**14 if dtype == torch.float16 else 1


def score_products(q: Tensor, k: Tensor) -> Tensor:
    """``q @ k.T`` in float32, for scores."""
    return dots_of_parts(q, k) if in_parts(q, k) else dot_products(q, k.T)


def dot_products(q: Tensor, k: Tensor, out: Tensor | None = None) -> Tensor:
    """``q @ k`` in float32; for float32, with TF32 as torch's own switches say."""
    if q.dtype == torch.float32:
        return torch.mm(q, k, out=out)
    return torch.mm(q, k, out_dtype=torch.float32, out=out)


def tile_lse(kind: LossKind, dots: Tensor, scale: Tensor, first_pair: int) -> tuple[Tensor, Tensor]:
    """The logsumexp of each row over some columns and, for SOFTMAX_BOTH, of each column over some rows.

    Pairs are left out. Each is a matrix with a row of parts for each row, or column, of tiles.
    """
    rows, columns = dots.shape
    plan, both = _plan(rows, columns), kind is LossKind.SOFTMAX_BOTH
    across, down, _ = plan.lse_tiles
    parts = dots.new_empty(across * rows + (down * columns if both else 0))
    row_parts = parts[: across * rows].view(across, rows)
    column_parts = parts[across * rows :].view(down, columns) if both else row_parts
    launch(
        kernels.tile_lse,
        plan.lse_tiles,
        (dots, scale, row_parts, column_parts, rows, columns, first_pair),
        (both, *LSE_TILE),
        dots.device,
        plan.alignment,
    )
    return row_parts, column_parts


class SoftmaxTerms(NamedTuple):
    """What one pass over the scores of a softmax gives."""

    row_lse: Tensor
    column_lse: Tensor | None  # if all rows are here
    column_parts: Tensor | None  # otherwise, the logsumexp of each column over some rows
    pairs: Tensor  # scores
    pair_weights: Tensor
    loss: Tensor


def softmax_terms(
    kind: LossKind,
    q: Tensor,
    k: Tensor,
    dots: Tensor,
    scale: Tensor,
    *,
    alone: bool,
    first_pair: int,
    mean_factor: float,
    smoothing: float,
) -> SoftmaxTerms:
    """The terms of the loss along rows and, if this rank is ``alone``, along columns."""
    rows, columns = dots.shape
    plan, both, device = _plan(rows, columns), kind is LossKind.SOFTMAX_BOTH, dots.device
    row_parts, column_parts = tile_lse(kind, dots, scale, first_pair)
    across, down, _ = plan.lse_tiles
    programs = plan.terms[0]
    memory = dots.new_empty(4 * rows + programs)
    row_lse, pairs, pair_weights, column_lse, loss_parts = memory.split_with_sizes(
        (rows, rows, rows, rows, programs)
    )
    complete = both and alone
    vectors = row_lse, column_lse, pairs, pair_weights, loss_parts
    sizes = rows, columns, q.shape[1], first_pair, across, down
    launch(
        kernels.softmax_terms,
        plan.terms,
        (q, k, scale, row_parts, column_parts, *vectors, *sizes, mean_factor, smoothing),
        (complete, *TERMS),
        device,
        plan.alignment,
        _alignment(q.shape[1]),
        q.data_ptr() % 16 == 0,
        k.data_ptr() % 16 == 0,
        q.dtype,
    )
    return SoftmaxTerms(
        row_lse,
        column_lse if complete else None,
        column_parts if both and not alone else None,
        pairs,
        pair_weights,
        loss_parts.sum(),
    )


def softmax_weights(
    weights: Weights,
    dots: Tensor,
    scale: Tensor,
    *,
    dtype: torch.dtype,
    by_loss: Tensor | None,
    first_pair: int,
    mean_factor: float,
) -> tuple[Tensor, Tensor]:
    """The derivative by each score; the gradient of the scale, and what products are multiplied by.

    The second includes ``by_loss`` unless it is None; the first never does.
    """
    rows, columns = dots.shape
    plan = _plan(rows, columns)
    by_score = dots.new_empty((rows, columns), dtype=dtype)
    parts = dots.new_empty(2, plan.tiles[0] * plan.tiles[1])
    assert weights.row_lse is not None
    has_columns, has_by_loss = weights.column_lse is not None, by_loss is not None
    column_lse = weights.column_lse if has_columns else scale
    vectors = weights.row_lse, column_lse, weights.pair_weights
    numbers = rows, columns, first_pair, 0, mean_factor, weights.smoothing
    unused = scale, scale
    launch(
        kernels.softmax_weights,
        plan.tiles,
        (
            dots,
            by_score,
            scale,
            *vectors,
            by_loss if has_by_loss else scale,
            parts,
            *unused,
            *numbers,
        ),
        (has_columns, has_by_loss, False, False, store_scale(dtype), *TILE),
        dots.device,
        plan.alignment,
        dtype,
    )
    return by_score, parts.sum(1)


def sigmoid_terms(
    dots: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    *,
    dtype: torch.dtype,
    needs_grad: bool,
    first_pair: int,
    mean_factor: float,
) -> tuple[Tensor, Tensor]:
    """The derivative by each score, and numbers.

    These are the loss, the gradients of the scale and the bias, and what products are multiplied by.
    """
    rows, columns = dots.shape
    plan = _plan(rows, columns)
    by_score = dots.new_empty((rows, columns) if needs_grad else 0, dtype=dtype)
    parts = dots.new_empty(4 if needs_grad else 1, plan.tiles[0] * plan.tiles[1])
    tensors = dots, by_score, scale, scale if bias is None else bias, parts
    launch(
        kernels.sigmoid_weights,
        plan.tiles,
        (*tensors, rows, columns, first_pair, mean_factor),
        (bias is not None, needs_grad, store_scale(dtype), *TILE),
        dots.device,
        plan.alignment,
        dtype,
    )
    return by_score, parts.sum(1)


def products(
    by_score: Tensor, q: Tensor, k: Tensor, *, needs_query_grad: bool, needs_key_grad: bool
) -> Tensor:
    """The products of the derivatives by scores with the keys, then with the queries, in float32."""
    rows, columns = by_score.shape
    both = q.new_empty((rows + columns, q.shape[1]), dtype=torch.float32)
    if needs_query_grad:
        dot_products(by_score, k, out=both[:rows])
    if needs_key_grad:
        dot_products(by_score.T, q, out=both[rows:])
    return both
