"""A mean over the rows of all ranks, in three messages: the ranks' tensors; sums; gradients.

    forward     what every rank needs of the others     all_gather
                sum of the terms, sum of the weights    all_reduce
    backward    gradients of the first, and the         reduce_scatter
                weights that the ranks give to the mean

The gradients of the sums are computed for a weight of one, so that they can travel with the ranks' own
weights. This is eager autograd's first derivative. All others, and torch.func, differentiate the same
steps one by one, in more messages.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from allgrad._autograd import call_order, checkpoints, started_calls
from allgrad._autograd.transforms import ANCHOR, in_lockstep, is_plain_autograd
from allgrad._core.torch_internals import anchor_gradient, never_traced, version_of
from allgrad._wire import primitives as wire
from allgrad._wire.consistency import refuse
from allgrad._wire.groups import find_group
from allgrad.collectives.all_gather import all_gather, reduce_scatter
from allgrad.collectives.all_reduce import all_reduce
from allgrad.errors import ModeError
from allgrad.losses._computed_on import computed_on
from allgrad.losses._pairs.key_blocks import KeyLayout, reduce_sums
from allgrad.losses._pairs.modes import refuse_batches
from allgrad.losses._rows.recompute import Unchanged, inner_graph
from allgrad.losses._tiles.accumulators import accumulator_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from allgrad.losses._arguments.packed import Packing
    from allgrad.losses._pairs.global_loss import GradReduction
    from allgrad.types import GroupLike

__all__ = ["GlobalMean"]


@dataclass(frozen=True, slots=True)
class GlobalMean:
    """How the mean is computed.

    ``sums(joined parts, constants, *own)`` gives two numbers of this rank: the weighted sum of its terms,
    and the sum of their weights. It holds no tensor itself: a loss that somebody keeps after backward
    would keep it too (test_nothing_is_kept_after_backward).
    """

    name: str
    rank: int
    packing: Packing
    sums: Callable[..., Tensor]
    grad_reduction: GradReduction
    group: GroupLike

    def __call__(self, *own: Tensor, constants: Sequence[Tensor] = ()) -> Tensor:
        """The mean of all ranks, on every rank; ``own`` are tensors that stay on this rank.

        ``constants`` are tensors without a gradient, which others may change: backward computes with them
        again, and raises if they were changed in place.
        """
        return computed_on(own[0].device, self._compute, own, constants)  # type: ignore[no-any-return]

    def _compute(self, own: Sequence[Tensor], constants: Sequence[Tensor]) -> Tensor:
        is_plain, alone = is_plain_autograd(), len(self.packing.sizes) == 1
        if alone and is_plain and not in_lockstep():
            sums = self.sums(self.packing.copies(), constants, *own)
            if sums.requires_grad or not torch.is_grad_enabled():
                total, weight = sums.unbind()
                return total / weight
            return self._mean_of_all(sums)  # which requires grad on every rank
        if alone or not is_plain:
            return self._mean(self.packing.gather_apart(self.group), own, constants)
        message = self.packing.pack()
        if in_lockstep() or not torch.is_grad_enabled():
            return self.step_by_step(message, own, constants)
        if started_calls.STATE.count:
            started_calls.finish(find_group(self.name, self.group))
        mean: Tensor = _Mean.apply(self, ANCHOR, len(own), message, *own, *constants)  # type: ignore[no-untyped-call]
        if call_order.STATE.gated:
            (mean,) = call_order.gate((mean,))
        return mean

    def with_graph(
        self, received: Tensor, own: Sequence[Tensor], constants: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """The sums of this rank, and what their graph begins with."""
        inputs = [x.detach().requires_grad_() for x in (received, *own)]
        with inner_graph():
            return self.sums(self.packing.unpack(inputs[0]), constants, *inputs[1:]), inputs

    def step_by_step(
        self, message: Tensor, own: Sequence[Tensor], constants: Sequence[Tensor]
    ) -> Tensor:
        """The mean, of which autograd sees every step."""
        received = all_gather(
            self.packing.with_row(message), sizes=self.packing.sizes, group=self.group
        )
        self.packing.confirm(received)
        return self._mean(self.packing.unpack(received), own, constants)

    def _mean(
        self, joined: list[Tensor], own: Sequence[Tensor], constants: Sequence[Tensor]
    ) -> Tensor:
        return self._mean_of_all(self.sums(joined, constants, *own))

    def _mean_of_all(self, sums: Tensor) -> Tensor:
        grad: Literal["sum", "same"] = "sum" if self.grad_reduction == "mean" else "same"
        total, weight = all_reduce(sums, group=self.group, grad=grad)
        mean: Tensor = total / weight
        return mean


@never_traced
@call_order.ordered
class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        how: GlobalMean,
        anchor: Tensor,  # noqa: ARG004
        count: int,
        message: Tensor,
        *tensors: Tensor,
    ) -> Tensor:
        own, constants = tensors[:count], tensors[count:]
        ctx.how, ctx.call, ctx.count = how, wire.resolve(how.name, how.group), count
        ctx.versions = [(weakref.ref(x), version_of(x)) for x in constants]
        sent = how.packing.with_row(message)
        received = all_gather(sent, sizes=how.packing.sizes, group=how.group, grad="none")
        how.packing.confirm(received)
        call_order.register(ctx, ctx.call, message)
        sums, inputs = how.with_graph(received, own, constants)
        total, weight = all_reduce(sums.detach(), group=how.group, grad="none")
        mean: Tensor = total / weight
        factors = torch.stack([1 / weight, -mean / weight])
        ctx.kept = sums, inputs, factors, Unchanged(inputs)
        ctx.save_for_backward(message, *tensors)
        checkpoints.mark(ctx)
        return mean

    @staticmethod
    def backward(ctx: Any, by_mean: Tensor) -> tuple[Tensor | None, ...]:
        call_order.check(ctx, ctx.call)
        refuse_batches(ctx.how.name, by_mean)
        # Before they are asked for: torch would raise on this rank alone.
        if any(x is not None and version_of(x) != version for x, version in _alive(ctx.versions)):
            refuse(ctx.call, _changed(ctx.how.name))
        checkpoints.come_to(ctx)
        saved = ctx.saved_tensors  # once: a checkpoint gives them once
        own, constants = saved[: 1 + ctx.count], saved[1 + ctx.count :]
        needed = ctx.needs_input_grad[3 : 4 + ctx.count]
        none = (None,) * len(constants)
        kept, ctx.kept = ctx.kept, None
        if torch.is_grad_enabled() or kept is None:  # create_graph=True, or a graph kept for more
            found = computed_on(by_mean.device, _in_steps, ctx.how, own, constants, needed, by_mean)
            return None, anchor_gradient(ctx), None, *found, *none
        sums, inputs, factors, is_unchanged = kept
        if not is_unchanged:
            received = inputs[0].detach()
            sums, inputs = computed_on(
                by_mean.device, ctx.how.with_graph, received, own[1:], constants
            )
        given = ctx.how, sums, inputs, factors, needed, by_mean
        by_message, *others = computed_on(by_mean.device, _in_one_message, *given)
        by_message = by_message[: len(own[0])]  # without the row of the agreement
        return None, anchor_gradient(ctx), None, by_message, *others, *none


def _alive(
    versions: Sequence[tuple[weakref.ref[Tensor], int]],
) -> Iterator[tuple[Tensor | None, int]]:
    """What nobody holds any more nobody has changed."""
    return ((x(), version) for x, version in versions)


def _changed(name: str) -> ModeError:
    return ModeError(
        f"{name}: the queue has been modified by an inplace operation since forward, and backward needs it "
        "as it was.\nChange it after backward. KeyQueue.push may come before: it makes new tensors."
    )


def _in_one_message(  # noqa: PLR0917
    how: GlobalMean,
    sums: Tensor,
    inputs: Sequence[Tensor],
    factors: Tensor,
    needed: Sequence[bool],
    by_mean: Tensor,
) -> tuple[Tensor, *tuple[Tensor | None, ...]]:
    # This rank's own weight, for as long as gradients are in 16 bits: a loss scale keeps small ones. Not a
    # small weight, which may not be that of the other ranks (test_ranks_may_weigh_the_loss_differently_and_go_back_twice).
    own_weight = torch.where(by_mean.abs() < 1, 1, by_mean)
    wanted = [inputs[0], *(x for x, n in zip(inputs[1:], needed[1:], strict=True) if n)]
    found = torch.autograd.grad(sums, wanted, factors * own_weight, materialize_grads=True)
    by_received, *others = (_wide(x) / own_weight.to(x.device) for x in found)
    sizes = how.packing.sizes
    if how.grad_reduction == "sum":
        sent, total = by_received * by_mean, by_mean
        rows = reduce_scatter(sent, sizes=sizes, group=how.group, grad="none")
        own = rows.to(found[0].dtype)
    else:
        layout, term = KeyLayout(how.rank, sizes, how.group), by_mean.to(by_received.dtype)
        rows, summed = reduce_sums(layout, by_received.unsqueeze(1), term)
        assert summed is not None
        own, total = (rows.squeeze(1) * summed).to(found[0].dtype), summed
    times_total = iter(
        (x * total.to(x.device)).to(like.dtype) for x, like in zip(others, found[1:], strict=True)
    )
    return own, *(next(times_total) if n else None for n in needed[1:])


def _wide(x: Tensor) -> Tensor:
    return x.to(accumulator_dtype(x.dtype))


def _in_steps(
    how: GlobalMean,
    saved: Sequence[Tensor],
    constants: Sequence[Tensor],
    needed: Sequence[bool],
    by_mean: Tensor,
) -> list[Tensor | None]:
    """The gradients, which can be differentiated again; every rank takes part in each call."""
    graph = torch.is_grad_enabled()
    with torch.enable_grad():
        inputs = [x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in saved]
        if graph and any(needed) and not needed[0]:
            # The messages of these gradients are in the second derivative of the other ranks, also where
            # this one is asked for some inputs only: all steps must lead to them.
            inputs[0] = _Linked.apply(saved[0].detach(), inputs[needed.index(True)])  # type: ignore[no-untyped-call]
        mean = how.step_by_step(inputs[0], inputs[1:], constants)
        found = torch.autograd.grad(
            mean, inputs, by_mean, create_graph=graph, materialize_grads=True
        )
        if graph and any(needed) and not needed[0]:
            # The message of this gradient is in the second derivative of the other ranks.
            first = needed.index(True)
            linked: Tensor = _Linked.apply(found[first], found[0])  # type: ignore[no-untyped-call]
            found = (*found[:first], linked, *found[first + 1 :])
    return [g if n else None for g, n in zip(found, needed, strict=True)]


class _Linked(torch.autograd.Function):
    """The first, whose derivative also comes to the second, as zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
        ctx.save_for_backward(other)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.zeros_like(ctx.saved_tensors[0])
