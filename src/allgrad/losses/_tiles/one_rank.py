"""The loss of one rank alone whose scores fit into memory, with the fewest launches.

    forward     dots = q @ k.T                        float32
                softmax: tile_lse, terms, weights     the loss, and the derivative by each score
                sigmoid: weights, sums
                weights @ k, weights.T @ q            float32
    backward    gradients                             these times one number, rounded once

So nothing is left for backward but one launch. What can be prepared for sizes is prepared once.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from allgrad.losses._kind import LossKind
from allgrad.losses._tiles import fused_kernels as kernels
from allgrad.losses._tiles.fused import (
    LSE_TILE,
    TERMS,
    TILE,
    dot_products,
    score_products,
    store_scale,
)
from allgrad.losses._tiles.launches import Launch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Products",
    "address_of",
    "aligned",
    "gradients",
    "gradients_plan",
    "loss_and_products",
]

_BLOCK = 2048  # elements of one program of the kernel ``gradients``
_SUM_BLOCK = 4096
_F32 = torch.float32


class Products(NamedTuple):
    """What forward keeps for backward."""

    by_query: Tensor | None  # weights @ k
    by_key: Tensor | None  # weights.T @ q
    parts: Tensor  # of the gradient by the scale; of a sigmoid this gradient and that by the bias


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


class _Softmax:
    """Launches for one size, and where the arrays lie in one piece of memory, in bytes."""

    def __init__(
        self, kind: LossKind, rows: int, columns: int, dtype: torch.dtype, *, is_address: bool
    ) -> None:
        both = kind is LossKind.SOFTMAX_BOTH
        across, down = _cdiv(columns, LSE_TILE[1]), _cdiv(rows, LSE_TILE[0])
        programs = _cdiv(rows, TERMS[1])
        arrays = (
            *(across * rows, down * columns if both else 0),  # parts of rows, of columns
            *(rows, columns if both else 0, rows, rows, programs),
        )
        starts = [sum(arrays[:i]) for i in range(len(arrays) + 1)]
        self.places, self.memory = [4 * start for start in starts[:-1]], starts[-1]
        self.pair_scores = slice(starts[4], starts[5])
        self.mean_factor, self.programs = 1 / (kind.directions * rows), programs
        self.across, self.down = across, down
        tiles = _cdiv(columns, TILE[1]), _cdiv(rows, TILE[0]), 1
        self.parts = tiles[0] * tiles[1]
        constants = both, False, True, is_address, store_scale(dtype)
        self.lse = Launch(kernels.tile_lse, (across, down, 1), (_F32,) * 4, (both, *LSE_TILE))
        self.terms = Launch(
            kernels.softmax_terms,
            (programs, 1, 1),
            (dtype, dtype, *(_F32,) * 8),
            (both, *TERMS),
        )
        self.weights = Launch(
            kernels.softmax_weights,
            tiles,
            (_F32, dtype, *(_F32,) * 7, torch.int64 if is_address else _F32),
            (*constants, *TILE),
        )


class _Sigmoid:
    def __init__(
        self, rows: int, columns: int, dtype: torch.dtype, *, has_bias: bool, is_address: bool
    ) -> None:
        tiles = _cdiv(columns, TILE[1]), _cdiv(rows, TILE[0]), 1
        self.parts, self.mean_factor = tiles[0] * tiles[1], 1 / rows
        self.weights = Launch(
            kernels.sigmoid_weights,
            tiles,
            (_F32, dtype, *(_F32,) * 3),
            (has_bias, True, store_scale(dtype), *TILE),
        )
        dtypes = _F32, torch.int64 if is_address else _F32, _F32
        self.sums = Launch(kernels.sums, (3, 1, 1), dtypes, (is_address, _SUM_BLOCK))


# By the device too: a compiled kernel belongs to one. By the width: a kernel is compiled for it.
@lru_cache(maxsize=128)
def _softmax(  # noqa: PLR0917
    kind: LossKind,
    rows: int,
    columns: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    is_address: bool,
) -> _Softmax:
    del width, device
    return _Softmax(kind, rows, columns, dtype, is_address=is_address)


@lru_cache(maxsize=128)
def _sigmoid(
    rows: int,
    columns: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    has_bias: bool,
    is_address: bool,
) -> _Sigmoid:
    del device
    return _Sigmoid(rows, columns, dtype, has_bias=has_bias, is_address=is_address)


def loss_and_products(
    kind: LossKind,
    q: Tensor,
    k: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    *,
    smoothing: float,
    needs_query_grad: bool,
    needs_key_grad: bool,
    address: Tensor | None = None,
) -> tuple[Tensor, Products]:
    """The loss, and its gradients before they are multiplied by ``by_loss``.

    With ``address``, the loss is stored where that points to, and the first result is ``address``.
    """
    q, k = aligned(q), aligned(k)
    dots = score_products(q, k)
    # In float32 each program overwrites its own tile.
    by_score = dots if q.dtype == _F32 else torch.empty_like(dots, dtype=q.dtype)
    loss = dots.new_empty(()) if address is None else address
    stream = torch.cuda.current_stream().cuda_stream
    if kind is LossKind.SIGMOID:
        parts = _sigmoid_weights(stream, dots, scale, bias, by_score, loss)
    else:
        parts = _softmax_weights(stream, kind, q, k, scale, smoothing, dots, by_score, loss)
    return loss, Products(
        dot_products(by_score, k) if needs_query_grad else None,
        dot_products(by_score.T, q) if needs_key_grad else None,
        parts,
    )


def _softmax_weights(  # noqa: PLR0917
    stream: int,
    kind: LossKind,
    q: Tensor,
    k: Tensor,
    scale: Tensor,
    smoothing: float,
    dots: Tensor,
    by_score: Tensor,
    loss: Tensor,
) -> Tensor:
    """Compute the weights and the loss; give the parts of the gradient by the scale."""
    rows, columns = dots.shape
    is_address = loss.dtype == torch.int64
    plan = _softmax(kind, rows, columns, q.shape[1], q.dtype, q.device, is_address=is_address)
    memory, parts = dots.new_empty(plan.memory), dots.new_empty(plan.parts)
    start, at_dots, at_scale = memory.data_ptr(), dots.data_ptr(), scale.data_ptr()
    places = [start + place for place in plan.places]
    row_parts, column_parts, row_lse, column_lse, pair_scores, pair_weights, loss_parts = places
    plan.lse(stream, at_dots, at_scale, row_parts, column_parts, rows, columns, 0)
    each = smoothing / columns
    plan.terms(
        stream,
        *(q.data_ptr(), k.data_ptr(), at_scale, row_parts, column_parts),
        *(row_lse, column_lse, pair_scores, pair_weights, loss_parts),
        *(rows, columns, q.shape[1], 0, plan.across, plan.down),
        *(plan.mean_factor, smoothing - each),
    )
    plan.weights(
        stream,
        *(at_dots, by_score.data_ptr(), at_scale, row_lse, column_lse, pair_weights, at_scale),
        *(parts.data_ptr(), loss_parts, loss.data_ptr()),
        *(rows, columns, 0, plan.programs, plan.mean_factor, each),
    )
    if smoothing:
        all_scores = scale * q.sum(0, dtype=_F32).dot(k.sum(0, dtype=_F32)) / columns
        smoothed = memory[plan.pair_scores].sum() - all_scores
        loss += smoothing * plan.mean_factor * smoothed
    return parts


def _sigmoid_weights(  # noqa: PLR0917
    stream: int, dots: Tensor, scale: Tensor, bias: Tensor | None, by_score: Tensor, loss: Tensor
) -> Tensor:
    """Compute the weights and the loss; give the gradients by scale and bias."""
    rows, columns = dots.shape
    has_bias, is_address = bias is not None, loss.dtype == torch.int64
    dtype, device = by_score.dtype, dots.device
    plan = _sigmoid(rows, columns, dtype, device, has_bias=has_bias, is_address=is_address)
    memory, numbers = dots.new_empty(4 * plan.parts), dots.new_empty(2)
    at_scale, parts = scale.data_ptr(), memory.data_ptr()
    plan.weights(
        stream,
        *(dots.data_ptr(), by_score.data_ptr(), at_scale),
        *(at_scale if bias is None else bias.data_ptr(), parts),
        *(rows, columns, 0, plan.mean_factor),
    )
    plan.sums(stream, parts, loss.data_ptr(), numbers.data_ptr(), plan.parts)
    return numbers


class GradientsPlan(NamedTuple):
    """The kernel that multiplies products of one size, and what it is given beside addresses."""

    launch: Launch
    numbers: tuple[float, ...]


@lru_cache(maxsize=128)
def gradients_plan(  # noqa: PLR0917
    kind: LossKind,
    rows: int,
    query_elements: int,
    key_elements: int,
    parts: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    has_bias: bool,
) -> GradientsPlan:
    del device
    programs = _cdiv(query_elements, _BLOCK) + _cdiv(key_elements, _BLOCK)
    dtypes = *(_F32,) * 5, dtype, dtype, _F32, _F32
    constants = has_bias, store_scale(dtype), _BLOCK
    launch = Launch(kernels.gradients, (max(programs, 1), 1, 1), dtypes, constants)
    count = 1 if kind is LossKind.SIGMOID else parts
    return GradientsPlan(
        launch, (query_elements, key_elements, count, 1 / (kind.directions * rows))
    )


def gradients(  # noqa: PLR0917
    kind: LossKind,
    q: Tensor,
    k: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    by_loss: Tensor,
    products: Products,
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor | None]:
    """The gradients by queries, keys, scale and bias."""
    left, right, parts = products
    by_query = None if left is None else torch.empty_like(left, dtype=q.dtype)
    by_key = None if right is None else torch.empty_like(right, dtype=k.dtype)
    by_scale = parts.new_empty(())
    by_bias = None if bias is None else parts.new_empty(())
    sizes = len(q), 0 if left is None else left.numel(), 0 if right is None else right.numel()
    has_bias = bias is not None
    plan = gradients_plan(kind, *sizes, parts.numel(), q.dtype, q.device, has_bias=has_bias)
    plan.launch(
        torch.cuda.current_stream().cuda_stream,
        *(address_of(left), address_of(right), parts.data_ptr()),
        *(scale.data_ptr(), by_loss.data_ptr()),
        *map(address_of, (by_query, by_key, by_scale, by_bias)),
        *plan.numbers,
    )
    return by_query, by_key, by_scale, by_bias


def address_of(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def aligned(x: Tensor) -> Tensor:
    """Contiguous, and where Triton reads 16 bytes at a time."""
    if not x.is_contiguous():
        return x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()
