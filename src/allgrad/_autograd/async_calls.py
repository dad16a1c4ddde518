"""``async_op``: a collective that starts in one place and ends in another, forward and backward.

Two nodes stand in the graph where a plain collective has one. They hand each other a ticket, an
empty tensor; the data travels outside the graph. In backward they swap their roles:

    forward    x --- start ---ticket---> wait  --- y        the call runs between the two
    backward   X --- wait  <---ticket--- start --- Y        so does its adjoint

What is computed between start and wait overlaps with the call, and the backward of that
computation overlaps with the adjoint.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import ref

import torch

from allgrad._autograd import backward_order, call_order, checkpoints, started_calls, transforms
from allgrad._core import call_queue
from allgrad._core.partition import dense
from allgrad._core.torch_internals import (
    anchor_gradient,
    is_batched_gradient,
    nodes_made,
)
from allgrad.errors import ModeError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from torch import Tensor

    from allgrad._autograd.adjoint_pair import AdjointPair

__all__ = ["DoneHandle", "Handle", "PendingCall", "start"]

T = TypeVar("T")
_SENDS_NOTHING = call_queue.Queue()


class Handle(Generic[T]):
    """A pending collective; ``wait()`` gives its result.

    Waiting twice gives the same result, or the same error, on any thread and in any order; each rank
    may wait for the handles of one group where and in the order it likes, but for those of several groups
    all ranks wait in one order: backward runs in it. The result has its gradient wherever it is waited for,
    also under ``no_grad``. A handle that nobody waits for still runs; without a result there is no gradient.
    """

    def __init__(self, finish: Callable[[], T]) -> None:
        """A handle whose first wait calls ``finish``."""
        self._finish: Callable[[], T] | None = finish
        self._result: T | None = None
        self._lock = threading.Lock()

    def wait(self) -> T:
        """The result, once it is here."""
        with self._lock:
            if self._finish is not None:
                self._result = self._finish()
                self._finish = None
        return self._result  # type: ignore[return-value]


class DoneHandle(Handle[T]):
    """The handle of a collective that is already done."""

    def __init__(self, result: T) -> None:
        """A handle of this result."""
        self._result = result

    def wait(self) -> T:
        """The result."""
        return self._result  # type: ignore[return-value]


class StartedHandle(Handle[T]):
    """The handle of a differentiable call."""

    def __init__(self, finish: Callable[[], T], forget: Callable[[], None]) -> None:
        """``forget`` is called once the result is here. Not in the place of its start, unless that is
        asked for.
        """
        super().__init__(finish)
        self._forget: Callable[[], None] | None = forget
        self.is_in_place = False

    def wait(self) -> T:
        """The result, once it is here."""
        result = super().wait()
        # Not before the result is kept: an interrupted wait begins again
        # (test_an_interrupted_wait_keeps_its_place).
        forget = self._forget
        if forget is not None:
            forget()
            self._forget = None
        return result

    def finish_in_place(self) -> None:
        """Finish it for the sake of a compiled call; in backward it comes where it was started."""
        if self._finish is not None:
            self.is_in_place = True
            self.wait()


class PendingCall:
    """One pair's map while it runs, and in backward its adjoint's."""

    def __init__(self, pair: AdjointPair, chain: backward_order.Chain | None = None) -> None:
        """A call that has not started; in lockstep it is tied to ``chain``."""
        self.pair, self.chain = pair, chain
        self.adjoint: PendingCall | None = None
        self.batch: Sequence[Tensor] | None = None  # the adjoint's results (is_grads_batched=True)
        self.is_ordered = False  # by call_order, when it goes backward
        self.started_by: ref[Any] | None = None  # the node, which holds this
        self._future: Future[tuple[Tensor, ...]] | None = None

    def start(self, xs: Sequence[Tensor]) -> None:
        pair, values = self.pair, [x.detach() for x in xs]
        queue = _SENDS_NOTHING if pair.call is None else pair.call.group.queue

        def run() -> tuple[Tensor, ...]:
            return transforms.copy_handed_through(transforms.run_map(pair, values), values)

        self._future = call_queue.start(run, queue)

    def wait(self) -> tuple[Tensor, ...]:
        assert self._future is not None
        return self._future.result()

    def has_failed(self) -> bool:
        future = self._future
        return future is not None and future.done() and future.exception() is not None

    def forget_results(self) -> None:
        """Once they are in a graph, which holds this call: they would keep themselves alive."""
        self._future = None


def start(
    pair: AdjointPair, xs: Sequence[Tensor], *, stop: bool = False
) -> Handle[tuple[Tensor, ...]]:
    """Start a pair's map.

    Under torch.compile, torch.func and forward mode it is done when the handle is there:
    compilers overlap calls themselves.
    """
    if not transforms.is_plain_autograd():
        return DoneHandle(transforms.apply(pair, xs, stop=stop))
    pending = PendingCall(pair)
    if stop or not transforms.needs_graph(xs):
        pending.start(xs)
        return Handle(pending.wait)
    group = None if pair.call is None else pair.call.group
    # Tied where it is started, not where, or on which thread, it is waited for.
    chain = pending.chain = backward_order.current_chain()
    ticket = _Start.apply(pending, transforms.ANCHOR, *xs)  # type: ignore[no-untyped-call]
    place = nodes_made()
    ticket.view(0)  # a node that takes this place, below those of all later calls

    def finish() -> tuple[Tensor, ...]:
        if not transforms.is_plain_autograd():
            raise ModeError(
                f"{pair.name}: its handle was started outside torch.func or forward mode, and is waited "
                "for inside.\nWait for it outside."
            )
        try:
            # Somebody may only want to log it: its gradient, and those of older calls, stay.
            with torch.inference_mode(False), torch.enable_grad():
                started_calls.finish(group, before=handle)
                results = _finished(pending, ticket)
                # A compiled call has its own number before this one can be finished
                # (test_a_handle_pending_at_a_compiled_call).
                if handle.is_in_place and chain is None:
                    call_order.move(results[0].grad_fn, place)
                return results
        except BaseException:
            if pending.has_failed():
                started_calls.forget(group, handle)
            raise

    def forget() -> None:
        started_calls.forget(group, handle)
        pending.forget_results()

    handle = StartedHandle(finish, forget)
    started_calls.add(group, handle)
    if chain is not None:
        chain.add_pending(handle.wait)
    return handle


def _finished(pending: PendingCall, ticket: Tensor) -> tuple[Tensor, ...]:
    """The node that waits for a call, tied to the chain in lockstep."""
    if pending.chain is not None:
        return pending.chain.append(lambda token: _Wait.apply(pending, token, ticket))  # type: ignore[no-untyped-call]
    pending.is_ordered = pending.pair.call is not None and torch.is_grad_enabled()
    _, *results = _Wait.apply(pending, transforms.ANCHOR, ticket)  # type: ignore[no-untyped-call]
    gated = pending.is_ordered and call_order.STATE.gated
    return call_order.gate(tuple(results)) if gated else tuple(results)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pending: PendingCall, anchor: Tensor, *xs: Tensor) -> Tensor:
        ctx.pending, pending.started_by = pending, ref(ctx)
        pending.start(xs)
        checkpoints.mark(ctx)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, ticket: Tensor) -> tuple[Tensor | None, ...]:
        batch, ctx.pending.batch = ctx.pending.batch, None
        if batch is None:
            batch = _finished(ctx.pending.adjoint, ticket)
            ctx.pending.adjoint.forget_results()
        return None, anchor_gradient(ctx), *batch


@call_order.ordered
class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        pending: PendingCall,
        token: Tensor,
        ticket: Tensor,  # noqa: ARG004
    ) -> tuple[Tensor, ...]:
        ctx.pending = pending
        results = pending.wait()
        if pending.is_ordered:
            ctx.call = pending.pair.call
            call_order.register(ctx, ctx.call, results[0])
        return token.new_empty(0), *results

    @staticmethod
    def backward(ctx: Any, token: Tensor, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # Its start is what a checkpoint must come to: some later one may be where the wait is.
        checkpoints.come_to(ctx.pending.started_by())
        if ctx.pending.is_ordered:
            call_order.check(ctx, ctx.call)
        if any(map(is_batched_gradient, gradients)):  # one message, waited for at once
            ctx.pending.batch = transforms.apply_adjoint(ctx.pending.pair, gradients)
            return None, token, token.new_empty(0)
        # With create_graph the adjoint is a collective of the chain too, for the next backward.
        chain = ctx.pending.chain if torch.is_grad_enabled() else None
        ctx.pending.adjoint = PendingCall(ctx.pending.pair.adjoint, chain)
        sent = dense(gradients)
        ticket = _Start.apply(ctx.pending.adjoint, transforms.ANCHOR, *sent)  # type: ignore[no-untyped-call]
        return None, token, ticket
