"""From an adjoint pair to a differentiable function, in whichever mode the caller is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from allgrad.adjoint_pair import AdjointPair

__all__ = ["apply"]

# A result requires grad on every rank, even where the local piece does not: another rank's piece
# may, and its backward needs everyone (test_piece_without_gradient_takes_part). Autograd marks a
# result when some input requires grad; this one always does, is empty, and never gets a gradient.
_ANCHOR = torch.empty(0, requires_grad=True)


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(pair: AdjointPair, anchor: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG004
        # A view made in here could not be changed in place by the caller (y /= 2), so the results
        # are unlinked from their bases. What is handed through as it is stays linked to its input.
        return tuple(
            y if any(y is x for x in xs) else torch.ops.aten._unsafe_view(y, y.shape)  # noqa: SLF001
            for y in pair.forward(xs)
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:  # noqa: ARG004
        ctx.pair = inputs[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *apply(ctx.pair.adjoint, gradients)

    @staticmethod
    def jvp(ctx: Any, _pair: None, _anchor: None, *tangents: Tensor) -> tuple[Tensor, ...]:
        return apply(ctx.pair, tangents)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        pair: AdjointPair,
        anchor: Tensor,  # noqa: ARG004
        *xs: Tensor,
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        # Pairs name dimensions from the front: one more at the end travels along unseen.
        batched = [
            x.unsqueeze(-1).expand(*x.shape, info.batch_size) if dim is None else x.movedim(dim, -1)
            for x, dim in zip(xs, in_dims[2:], strict=True)
        ]
        return apply(pair, batched), (-1,) * len(xs)


def apply(pair: AdjointPair, xs: Sequence[Tensor], *, stop: bool = False) -> tuple[Tensor, ...]:
    """Run the pair's map, differentiable to any order; ``stop`` ends the gradient there."""
    if stop:
        with torch.no_grad():
            return apply(pair, xs)
    if _plain_call(xs):
        return tuple(pair.forward(xs))
    results: tuple[Tensor, ...] = _Apply.apply(pair, _ANCHOR, *xs)  # type: ignore[no-untyped-call]
    return results


def _plain_call(xs: Sequence[Tensor]) -> bool:
    """Tell whether nothing asks for a derivative: no graph, no tangent, no torch.func transform."""
    if torch._C._are_functorch_transforms_active():  # noqa: SLF001
        return False
    if forward_ad._current_level >= 0:  # noqa: SLF001
        return False
    return not (
        torch.is_grad_enabled() and any(x.is_floating_point() or x.is_complex() for x in xs)
    )
