"""The loss in modes beside plain eager autograd: second derivatives, torch.func, forward mode.

    loss                 derivative by inputs: first gradients       along a direction: a number
    first gradients      derivative: second gradients                along a direction: refused
    second gradients     refused

Each is an autograd.Function of everything it depends on, so that autograd cannot prune what refuses
(test_third_derivative_is_refused). What these compute, they compute without a graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from allgrad._autograd.backward_order import current_chain
from allgrad._autograd.transforms import ANCHOR, mode_anchor
from allgrad._core.torch_internals import anchor_gradient, is_batched_gradient, never_traced
from allgrad.errors import ModeError
from allgrad.losses._computed_on import computed_on
from allgrad.losses._pairs.first_order import Inputs, Kept, first_gradients, loss_value
from allgrad.losses._pairs.second_order import directional_derivative, second_gradients

if TYPE_CHECKING:
    from typing import TypeAlias

    from torch import Tensor

    from allgrad.losses._pairs.config import LossConfig

    Gradients: TypeAlias = tuple[Tensor | None, ...]

__all__ = ["differentiable_gradients", "loss_in_transform", "no_vmap", "refuse_batches"]

_ALL = (True,) * 4


def loss_in_transform(config: LossConfig, x: Inputs) -> Tensor:
    """The loss under torch.func or in forward mode."""
    loss: Tensor = _Loss.apply(config, mode_anchor(tangents=True), *x)  # type: ignore[no-untyped-call]
    return loss


def differentiable_gradients(
    config: LossConfig, forward: tuple[Kept, Any] | None, x: Inputs, by_loss: Tensor
) -> Gradients:
    """The gradients by all inputs, which can be differentiated once more.

    ``forward`` is what the forward pass kept, and which gradients are needed; None computes it again.
    """
    chain = current_chain()
    if chain is not None:
        return chain.tie(
            lambda token: _FirstGradients.apply(config, forward, token, *x, by_loss)  # type: ignore[no-untyped-call]
        )
    found: Gradients = _FirstGradients.apply(config, forward, ANCHOR, *x, by_loss)  # type: ignore[no-untyped-call]
    return found


class _Mode(torch.autograd.Function):
    """What is common to these functions: there are no batches of losses."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, config: LossConfig, *_: Any) -> Any:  # noqa: ARG004
        raise no_vmap(config.name)


def no_vmap(name: str) -> ModeError:
    return ModeError(
        f"{name}: a loss of all ranks has no batches of losses for torch.vmap.\nCall it in a loop."
    )


def refuse_batches(name: str, *gradients: Tensor | None) -> None:
    """Raise before anything is sent of gradients that torch's first vmap batched (is_grads_batched)."""
    if any(g is not None and is_batched_gradient(g) for g in gradients):
        raise ModeError(
            f"{name}: backward takes one gradient of the loss at a time, not a batch of them.\n"
            "Leave out is_grads_batched=True and vectorize=True."
        )


@never_traced
class _Loss(_Mode):
    @staticmethod
    def forward(config: LossConfig, anchor: Tensor, *x: Tensor) -> Tensor:  # noqa: ARG004
        inputs = Inputs(*x)
        loss, _ = computed_on(x[0].device, loss_value, config, inputs, _ALL)
        return loss  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004
        ctx.config, _, *x = inputs
        ctx.save_for_backward(*x)
        ctx.save_for_forward(*x)

    @staticmethod
    def backward(ctx: Any, by_loss: Tensor) -> Gradients:
        refuse_batches(ctx.config.name, by_loss)
        return (
            None,
            None,
            *differentiable_gradients(ctx.config, None, Inputs(*ctx.saved_tensors), by_loss),
        )

    @staticmethod
    def jvp(ctx: Any, _config: None, _anchor: Any, *tangents: Tensor | None) -> Tensor:
        refuse_batches(ctx.config.name, *tangents)
        x = ctx.saved_tensors
        direction = [
            torch.zeros_like(value) if tangent is None and value is not None else tangent
            for value, tangent in zip(x, tangents, strict=True)
        ]
        found: Tensor = _Directional.apply(ctx.config, ANCHOR, *x, *direction)  # type: ignore[no-untyped-call]
        return found


@never_traced
class _FirstGradients(_Mode):
    @staticmethod
    def forward(
        config: LossConfig,
        forward: tuple[Kept, Any] | None,
        anchor: Tensor,  # noqa: ARG004
        *inputs: Tensor,
    ) -> Gradients:
        x, by_loss = Inputs(*inputs[:4]), inputs[4]
        device = by_loss.device
        if forward is None:
            _, kept = computed_on(device, loss_value, config, x, _ALL)
            forward = kept, _ALL
        found: Gradients = computed_on(device, first_gradients, config, x, by_loss, *forward)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Gradients) -> None:  # noqa: ARG004
        ctx.config, _, _, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *direction: Tensor | None) -> Gradients:
        refuse_batches(ctx.config.name, *direction)
        *x, by_loss = ctx.saved_tensors
        along = [
            torch.zeros_like(value) if change is None and value is not None else change
            for value, change in zip(x, direction, strict=True)
        ]
        found = _SecondGradients.apply(ctx.config, ANCHOR, *x, by_loss, *along)  # type: ignore[no-untyped-call]
        return None, None, anchor_gradient(ctx), *found

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise _too_high(ctx.config.name, "forward mode over the gradient")


@never_traced
class _SecondGradients(_Mode):
    @staticmethod
    def forward(config: LossConfig, anchor: Tensor, *inputs: Tensor) -> Gradients:  # noqa: ARG004
        x, by_loss, direction = Inputs(*inputs[:4]), inputs[4], Inputs(*inputs[5:])
        found: Gradients = computed_on(
            by_loss.device, second_gradients, config, x, by_loss, direction
        )
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Gradients) -> None:  # noqa: ARG004
        ctx.name = inputs[0].name

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise _too_high(ctx.name, "third derivatives")

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise _too_high(ctx.name, "third derivatives")


@never_traced
class _Directional(_Mode):
    @staticmethod
    def forward(config: LossConfig, anchor: Tensor, *inputs: Tensor) -> Tensor:  # noqa: ARG004
        x, direction = Inputs(*inputs[:4]), Inputs(*inputs[4:])
        found: Tensor = computed_on(x.q.device, directional_derivative, config, x, direction)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004
        ctx.name = inputs[0].name

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise _too_high(ctx.name, "derivatives of a forward-mode derivative")

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise _too_high(ctx.name, "derivatives of a forward-mode derivative")


def _too_high(name: str, what: str) -> ModeError:
    return ModeError(
        f"{name}: this loss does not have {what}; it has first and second derivatives.\nFor others, "
        "join the features with allgrad.all_gather and use the formula in allgrad.losses.reference."
    )
