"""The loss in modes beside plain eager autograd: second derivatives, torch.func, forward mode, batches.

    function             its derivative in reverse mode         in forward mode
    loss                 first gradients                        directional derivative, a number
    first gradients      second gradients                       change of the gradients
    directional          second gradients, first gradients      refused

Derivatives of the other functions would be third ones, and are refused. Each function is an
autograd.Function of everything it depends on, so that autograd cannot prune what refuses
(test_third_derivative_is_refused). What these compute, they compute without a graph.

A batch of torch.vmap is a loop: entry b of it meets entry b of the other ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from allgrad._autograd.backward_order import current_chain
from allgrad._autograd.transforms import mode_anchor
from allgrad._core.torch_internals import (
    anchor_gradient,
    functorch_active,
    is_batched_gradient,
    is_view,
    never_traced,
    transform_names,
)
from allgrad.errors import ModeError
from allgrad.losses._computed_on import computed_on
from allgrad.losses._pairs.first_order import Inputs, Kept, first_gradients, loss_value
from allgrad.losses._pairs.second_order import (
    directional_derivative,
    gradient_change,
    second_gradients,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeAlias

    from torch import Tensor

    from allgrad.losses._pairs.config import LossConfig

    Gradients: TypeAlias = tuple[Tensor | None, ...]

__all__ = ["Forward", "differentiable_gradients", "loss_in_transform", "refuse_batches"]

_ALL = (True,) * 4


@dataclass(frozen=True, slots=True)
class Forward:
    """What the forward pass kept, and which gradients are needed. No nest, or torch.func would open it."""

    kept: Kept
    needed: Sequence[bool]


def loss_in_transform(config: LossConfig, x: Inputs) -> Tensor:
    """The loss under torch.func or in forward mode."""
    if current_chain() is not None and torch.is_grad_enabled():
        raise ModeError(
            f"{config.name}: lockstep orders the backward of autograd, not of torch.func or forward "
            "mode.\nUse those outside the lockstep block."
        )
    # Torch differentiates the jvp of an autograd.Function in reverse mode only; here it would give zeros.
    if functorch_active() and transform_names().count("Jvp") > 1:
        raise _too_high(config.name, "forward mode inside forward mode")
    loss: Tensor = _Loss.apply(config, mode_anchor(tangents=True), *x)  # type: ignore[no-untyped-call]
    return loss


def differentiable_gradients(
    config: LossConfig, forward: Forward | None, x: Inputs, by_loss: Tensor
) -> Gradients:
    """The gradients by all inputs, which can be differentiated once more.

    ``forward`` is what the forward pass kept; None computes it again.
    """
    chain = current_chain()
    if chain is not None:
        return chain.tie(
            lambda token: _FirstGradients.apply(config, token, forward, *x, by_loss)  # type: ignore[no-untyped-call]
        )
    return _first_gradients(config, forward, x, by_loss)


def refuse_batches(name: str, *gradients: Tensor | None) -> None:
    """Raise before anything is sent of gradients that torch's first vmap batched (is_grads_batched)."""
    if any(g is not None and is_batched_gradient(g) for g in gradients):
        raise ModeError(
            f"{name}: backward takes one gradient of the loss at a time, not a batch of them.\n"
            "Leave out is_grads_batched=True and vectorize=True, or use torch.func."
        )


class _Mode(torch.autograd.Function):
    """What is common to these functions. Their first two inputs are the config and the anchor,
    which is in every mode that is on: a rank takes part in it with copies and zeros of its own.
    """

    @classmethod
    def vmap(cls, info: Any, in_dims: Sequence[int | None], *args: Any) -> Any:
        if not info.batch_size:
            raise ModeError(f"{args[0].name}: torch.vmap has no loss of a batch of size 0.")
        found = [
            cls.apply(  # type: ignore[no-untyped-call]
                *(
                    x if dim is None else x.select(dim, n)
                    for x, dim in zip(args, in_dims, strict=True)
                )
            )
            for n in range(info.batch_size)
        ]
        if isinstance(found[0], torch.Tensor):
            return torch.stack(found), 0
        columns = [
            None if column[0] is None else torch.stack(column)
            for column in zip(*found, strict=True)
        ]
        return tuple(columns), tuple(None if x is None else 0 for x in columns)


def _first_gradients(
    config: LossConfig, forward: Forward | None, x: Inputs, by_loss: Tensor
) -> Gradients:
    found: Gradients = _FirstGradients.apply(  # type: ignore[no-untyped-call]
        config, mode_anchor(tangents=True), forward, *x, by_loss
    )
    return found


def _filled(direction: Sequence[Tensor | None], x: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The direction, with zeros for what does not move."""
    return [
        torch.zeros_like(value) if change is None and value is not None else change
        for value, change in zip(x, direction, strict=True)
    ]


def _is_still(tangents: Sequence[Tensor | None]) -> bool:
    """Whether nothing moves but the anchor.

    Of dual numbers around func.grad, that one moves inside it too (mode_anchor). What comes of it is zero
    along the dual numbers (test_a_rank_without_tangent_takes_part_in_the_change_of_the_gradient).
    """
    return all(x is None for x in tangents)


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
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*x)
        ctx.save_for_forward(*x)

    @staticmethod
    def backward(ctx: Any, by_loss: Tensor | None) -> Gradients:
        refuse_batches(ctx.config.name, by_loss)
        x = Inputs(*ctx.saved_tensors)
        by_loss = torch.zeros_like(x.scale) if by_loss is None else by_loss
        return None, None, *differentiable_gradients(ctx.config, None, x, by_loss)

    @staticmethod
    def jvp(ctx: Any, _config: None, _anchor: Any, *tangents: Tensor | None) -> Tensor:
        refuse_batches(ctx.config.name, *tangents)
        x = ctx.saved_tensors
        found: Tensor = _Directional.apply(  # type: ignore[no-untyped-call]
            ctx.config, mode_anchor(tangents=False), _is_still(tangents), *x, *_filled(tangents, x)
        )
        return found


@never_traced
class _FirstGradients(_Mode):
    @staticmethod
    def forward(
        config: LossConfig,
        anchor: Tensor,  # noqa: ARG004
        forward: Forward | None,
        *inputs: Tensor,
    ) -> Gradients:
        x, by_loss = Inputs(*inputs[:4]), inputs[4]
        device = by_loss.device
        if forward is None:
            # Grad mode tells nothing of a transform (test_nestings).
            config = replace(config, needs_grad=True, needs_key_grad=True)
            _, kept = computed_on(device, loss_value, config, x, _ALL)
            forward = Forward(kept, _ALL)
        found: Gradients = computed_on(
            device, first_gradients, config, x, by_loss, forward.kept, forward.needed
        )
        # Torch refuses views where it has tangents too (test_dual_numbers_around_the_gradient).
        return tuple(x.clone() if x is not None and is_view(x) else x for x in found)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Gradients) -> None:
        ctx.config, _, _, *tensors = inputs
        ctx.found = [x is not None for x in output]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *direction: Tensor | None) -> Gradients:
        refuse_batches(ctx.config.name, *direction)
        *x, by_loss = ctx.saved_tensors
        found = _SecondGradients.apply(  # type: ignore[no-untyped-call]
            ctx.config, mode_anchor(tangents=True), *x, by_loss, *_filled(direction, x)
        )
        return None, anchor_gradient(ctx), None, *found

    @staticmethod
    def jvp(
        ctx: Any, _config: None, _anchor: Any, _forward: None, *tangents: Tensor | None
    ) -> Gradients:
        refuse_batches(ctx.config.name, *tangents)
        inputs = ctx.saved_tensors
        direction = _filled(tangents, inputs)
        found: Gradients = _GradientChange.apply(  # type: ignore[no-untyped-call]
            ctx.config, mode_anchor(tangents=False), _is_still(tangents), *inputs, *direction
        )
        return tuple(x if is_found else None for x, is_found in zip(found, ctx.found, strict=True))


@never_traced
class _Directional(_Mode):
    @staticmethod
    def forward(
        config: LossConfig,
        anchor: Tensor,  # noqa: ARG004
        is_still: bool,  # noqa: ARG004
        *inputs: Tensor,
    ) -> Tensor:
        x, direction = Inputs(*inputs[:4]), Inputs(*inputs[4:])
        found: Tensor = computed_on(x.q.device, directional_derivative, config, x, direction)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004
        ctx.config, _, ctx.is_still, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, by_derivative: Tensor) -> Gradients:
        refuse_batches(ctx.config.name, by_derivative)
        x, direction = Inputs(*ctx.saved_tensors[:4]), ctx.saved_tensors[4:]
        *by_inputs, _ = _SecondGradients.apply(  # type: ignore[no-untyped-call]
            ctx.config, mode_anchor(tangents=True), *x, by_derivative, *direction
        )
        by_direction = _first_gradients(ctx.config, None, x, by_derivative)
        return None, None, None, *by_inputs, *by_direction

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Tensor:
        if ctx.is_still:
            zero: Tensor = ctx.saved_tensors[2].new_zeros(())
            return zero
        raise _too_high(ctx.config.name, "forward mode inside forward mode")


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
class _GradientChange(_Mode):
    @staticmethod
    def forward(
        config: LossConfig,
        anchor: Tensor,  # noqa: ARG004
        is_still: bool,  # noqa: ARG004
        *inputs: Tensor,
    ) -> Gradients:
        x, by_loss = Inputs(*inputs[:4]), inputs[4]
        direction, by_loss_change = Inputs(*inputs[5:9]), inputs[9]
        found: Gradients = computed_on(
            by_loss.device, gradient_change, config, x, by_loss, direction, by_loss_change
        )
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Gradients) -> None:
        ctx.name, ctx.is_still = inputs[0].name, inputs[2]
        ctx.save_for_forward(*output)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise _too_high(ctx.name, "third derivatives")

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        if ctx.is_still:
            return tuple(None if x is None else torch.zeros_like(x) for x in ctx.saved_tensors)
        raise _too_high(ctx.name, "third derivatives")


def _too_high(name: str, what: str) -> ModeError:
    return ModeError(
        f"{name}: this loss does not have {what}; it has first and second derivatives.\nIn place of "
        "torch.autograd.functional.hvp take vhp, or torch.func.jvp of torch.func.grad. For higher ones, join "
        "the features with allgrad.all_gather and use the formula in allgrad.losses.reference."
    )
