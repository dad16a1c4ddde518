"""From an adjoint pair to a differentiable function, in whichever mode the caller is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

if TYPE_CHECKING:
    from torch import Tensor

    from allgrad.adjoint_pair import AdjointPair

__all__ = ["apply"]

# A result requires grad on every rank, even where the local piece does not: another rank's piece
# may, and its backward needs everyone (test_piece_without_gradient_takes_part). Autograd marks a
# result when some input requires grad; this one always does, is empty, and never gets a gradient.
_ANCHOR = torch.empty(0, requires_grad=True)


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(pair: AdjointPair, x: Tensor, anchor: Tensor) -> Tensor:  # noqa: ARG004
        return pair.forward(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[AdjointPair, Tensor, Tensor], output: Tensor) -> None:  # noqa: ARG004
        ctx.pair = inputs[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        return None, apply(ctx.pair.adjoint, gradient), None

    @staticmethod
    def jvp(ctx: Any, _pair: None, tangent: Tensor, _anchor: None) -> Tensor:
        return apply(ctx.pair, tangent)

    @staticmethod
    def vmap(
        info: Any,  # noqa: ARG004
        in_dims: tuple[None, int | None, None],
        pair: AdjointPair,
        x: Tensor,
        anchor: Tensor,  # noqa: ARG004
    ) -> tuple[Tensor, int | None]:
        batch = in_dims[1]
        if batch is None:
            return apply(pair, x), None
        # Pairs name dimensions from the front: one more at the end travels along unseen.
        return apply(pair, x.movedim(batch, -1)), -1


def apply(pair: AdjointPair, x: Tensor, *, stop: bool = False) -> Tensor:
    """Run the pair's map on ``x``, differentiable to any order; ``stop`` ends the gradient there."""
    if stop:
        with torch.no_grad():
            return apply(pair, x)
    if _plain_call(x):
        return pair.forward(x)
    result: Tensor = _Apply.apply(pair, x, _ANCHOR)
    return result


def _plain_call(x: Tensor) -> bool:
    """Tell whether nothing asks for a derivative: no graph, no tangent, no torch.func transform."""
    if torch._C._are_functorch_transforms_active():  # noqa: SLF001
        return False
    if forward_ad._current_level >= 0:  # noqa: SLF001
        return False
    return not (torch.is_grad_enabled() and (x.is_floating_point() or x.is_complex()))
