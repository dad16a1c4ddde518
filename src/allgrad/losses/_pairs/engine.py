"""Contrastive losses over the pairs of all ranks, with exact gradients: one engine for every kind.

The score matrix has a row for each query and a column for each key of all ranks. Each rank computes
the rows of its own queries, in tiles, once per pass:

                 keys of rank 0    of rank 1    of rank 2
    rank 0       [ scores          scores       scores ]     its queries
    rank 1       [ scores          scores       scores ]     its queries
    rank 2       [ scores          scores       scores ]     its queries

Sums along rows are complete on one rank. Sums along columns are combined by a logsumexp over ranks.
Gradients of keys are summed over ranks, and each rank receives the sum for its own keys. So a step
makes three collective calls:

    forward     keys                         all_gather
                column sums, and the loss    all_gather
    backward    gradients of keys, and the   reduce_scatter
                weights that the ranks give to the loss

The score of a pair is kept out of these sums. With ``negatives`` for the logsumexp of the other
scores, a pair's term of the loss is

    log(1 + exp(negatives - score of the pair))

It keeps its digits even if the pair's score is far above the others and the loss is close to zero;
a difference of two large sums would be noise (test_tiny_loss_of_saturated_scores_keeps_its_digits).
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any

import torch

from allgrad._autograd import call_order, checkpoints, started_calls
from allgrad._autograd.backward_order import current_chain
from allgrad._autograd.transforms import ANCHOR, is_plain_autograd
from allgrad._core.torch_internals import anchor_gradient, functorch_active, never_traced
from allgrad._wire import primitives as wire
from allgrad._wire.groups import find_group
from allgrad.errors import ModeError
from allgrad.losses._computed_on import computed_on
from allgrad.losses._pairs.first_order import Inputs, Kept, first_gradients, loss_value
from allgrad.losses._pairs.modes import (
    Forward,
    differentiable_gradients,
    loss_in_transform,
    refuse_batches,
)
from allgrad.losses._tiles.accumulators import accumulator_dtype

if TYPE_CHECKING:
    from torch import Tensor

    from allgrad.losses._pairs.config import LossConfig

__all__ = ["contrastive_loss"]


def contrastive_loss(
    config: LossConfig, q: Tensor, k: Tensor, scale: Tensor, bias: Tensor | None
) -> Tensor:
    """The loss of all pairs, on every rank. Query i and key i are a pair; more keys may follow."""
    scale = _number(scale, q)
    bias = None if bias is None else _number(bias, q)
    # The anchor always requires grad and lets every rank take part in backward, even one whose
    # features need no gradient (test_rank_without_gradient_takes_part).
    if not is_plain_autograd():
        return loss_in_transform(config, Inputs(q, k, scale, bias))
    if started_calls.STATE.count:
        started_calls.finish(find_group(config.name, config.layout.group))
    chain, given = current_chain(), (q, k, scale, bias)
    if chain is not None and torch.is_grad_enabled():
        (tied,) = chain.tie(lambda token: (computed_on(q.device, _apply, config, token, *given),))
        assert tied is not None
        return tied
    loss: Tensor = computed_on(q.device, _apply, config, ANCHOR, *given)
    if call_order.STATE.gated and loss.requires_grad and config.layout.world > 1:
        (loss,) = call_order.gate((loss,))
    return loss


def _number(x: Tensor, q: Tensor) -> Tensor:
    """A scale or bias on the features' device, in the accumulators' dtype."""
    dtype = accumulator_dtype(q.dtype)
    if x.dtype is dtype and not x.dim() and x.device == q.device:
        return x
    if q.is_cuda and not x.is_cuda and not x.requires_grad and is_plain_autograd():
        return torch.full((), float(x), device=q.device, dtype=dtype)  # a copy would wait
    return x.reshape(()).to(q.device, dtype)


@never_traced
@call_order.ordered
class _ContrastiveLoss(torch.autograd.Function):
    """The loss in eager autograd."""

    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any,
        config: LossConfig,
        anchor: Tensor,  # noqa: ARG004
        q: Tensor,
        k: Tensor,
        scale: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        chain = current_chain()
        # Weakly: a block whose backward never runs would keep its losses.
        ctx.config, ctx.chain = config, None if chain is None else weakref.ref(chain)
        ctx.call = wire.resolve(config.name, config.layout.group)
        try:
            loss, kept = loss_value(config, Inputs(q, k, scale, bias), ctx.needs_input_grad[2:])
        except RuntimeError as error:
            if _SELECTIVE in str(error):
                raise _saved_in_place(config.name) from error
            raise
        # Not before the first gather: what a rank expected may not come, and be called anew.
        if ctx.call.size > 1:
            call_order.register(ctx, ctx.call, q)
        ctx.save_for_backward(q, k, scale, bias, *kept.flatten())
        checkpoints.mark(ctx)
        return loss

    @staticmethod
    def backward(ctx: Any, by_loss: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.call.size > 1:
            call_order.check(ctx, ctx.call)
        refuse_batches(ctx.config.name, by_loss)
        checkpoints.come_to(ctx)
        saved, needed = ctx.saved_tensors, ctx.needs_input_grad[2:]
        x, kept = Inputs(*saved[:4]), Kept.unflatten(saved[4:])
        # create_graph=True, or torch.vmap of backward
        if torch.is_grad_enabled() or functorch_active():
            chain = None if ctx.chain is None else ctx.chain()
            with contextlib.nullcontext() if chain is None else chain.recording():
                forward = Forward(kept, needed)
                return None, None, *differentiable_gradients(ctx.config, forward, x, by_loss)
        found = computed_on(by_loss.device, first_gradients, ctx.config, x, by_loss, kept, needed)
        return None, anchor_gradient(ctx), *found


_SELECTIVE = "selective activation checkpoint"  # what torch's errors of it say


def _saved_in_place(name: str) -> ModeError:
    return ModeError(
        f"{name}: selective activation checkpointing saved a tensor that the loss changes in place, such as "
        "that of mm.out.\nLet the policy save matrix products alone (torch.ops.aten.mm.default, addmm, bmm), or leave the "
        "loss out of the region."
    )


# The same as _ContrastiveLoss.apply outside of torch.func, less what that one does in Python.
_apply: Any = super(torch.autograd.Function, _ContrastiveLoss).apply
