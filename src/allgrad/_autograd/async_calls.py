"""``async_op``: a collective that starts in one place and ends in another, forward and backward.

Two nodes stand in the graph where a plain collective has one. They hand each other a ticket, an
empty tensor; what flies, flies beside the graph. In backward they swap their roles:

    forward    x --- depart ---ticket---> arrive --- y        the call runs between the two
    backward   X --- arrive <---ticket--- depart --- Y        so does its adjoint

So what is computed between start and wait overlaps with the call, and what that computation's
backward does overlaps with the adjoint.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from allgrad._autograd import backward_order, transforms
from allgrad._core import call_queue as departures

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from torch import Tensor

    from allgrad._autograd.adjoint_pair import AdjointPair

__all__ = ["Flight", "Handle", "Landed", "start"]

Nest = TypeVar("Nest")


class Handle(Generic[Nest]):
    """A collective under way; ``wait()`` gives its result.

    Waiting twice gives the same result, on any thread and in any order. A handle that nobody
    waits for is made all the same; without a result there is no gradient.
    """

    def __init__(self, finish: Callable[[], Nest]) -> None:
        """A handle whose first wait calls ``finish``."""
        self._finish: Callable[[], Nest] | None = finish
        self._result: Nest | None = None
        self._lock = threading.Lock()

    def wait(self) -> Nest:
        """The result, once it is here."""
        with self._lock:
            if self._finish is not None:
                self._result = self._finish()
                self._finish = None
        return self._result  # type: ignore[return-value]


class Landed(Handle[Nest]):
    """A collective that was done by the time its handle was there."""

    def __init__(self, result: Nest) -> None:
        """A handle of this result."""
        self._result = result

    def wait(self) -> Nest:
        """The result."""
        return self._result  # type: ignore[return-value]


class Flight:
    """One pair's map under way, and in backward its adjoint's."""

    def __init__(self, pair: AdjointPair) -> None:
        """A flight that has not started."""
        self.pair = pair
        self.back: Flight | None = None
        self._future: Future[tuple[Tensor, ...]] | None = None

    def depart(self, xs: Sequence[Tensor]) -> None:
        pair, values = self.pair, [x.detach() for x in xs]
        self._future = departures.depart(lambda: transforms.unlinked(pair, values))

    def land(self) -> tuple[Tensor, ...]:
        # Kept here, the results would keep themselves alive: their graph holds this flight.
        assert self._future is not None
        future, self._future = self._future, None
        return future.result()


def start(
    pair: AdjointPair, xs: Sequence[Tensor], *, stop: bool = False
) -> Handle[tuple[Tensor, ...]]:
    """Start a pair's map.

    Under torch.compile, torch.func and forward mode it has run by the time the handle is there:
    compilers overlap calls themselves.
    """
    if not transforms.is_plain_autograd():
        return Landed(transforms.apply(pair, xs, stop=stop))
    flight = Flight(pair)
    if stop or not transforms.needs_graph(xs):
        flight.depart(xs)
        return Handle(flight.land)
    ticket = _Depart.apply(flight, transforms.ANCHOR, *xs)  # type: ignore[no-untyped-call]

    def arrive() -> tuple[Tensor, ...]:
        chain = backward_order.growing()
        if chain is not None:
            return chain.thread(lambda token: _Arrive.apply(flight, token, ticket))  # type: ignore[no-untyped-call]
        _, *results = _Arrive.apply(flight, transforms.ANCHOR, ticket)  # type: ignore[no-untyped-call]
        return tuple(results)

    handle = Handle(arrive)
    chain = backward_order.growing()
    if chain is not None:
        chain.owe(handle.wait)
    return handle


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flight: Flight, anchor: Tensor, *xs: Tensor) -> Tensor:
        ctx.flight = flight
        flight.depart(xs)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, ticket: Tensor) -> tuple[Tensor | None, ...]:
        _, *gradients = _Arrive.apply(ctx.flight.back, transforms.ANCHOR, ticket)  # type: ignore[no-untyped-call]
        return None, None, *gradients


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flight: Flight, token: Tensor, ticket: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG004
        ctx.flight = flight
        return token.new_empty(0), *flight.land()

    @staticmethod
    def backward(ctx: Any, token: Tensor, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.flight.back = Flight(ctx.flight.pair.adjoint)
        ticket = _Depart.apply(ctx.flight.back, transforms.ANCHOR, *gradients)  # type: ignore[no-untyped-call]
        return None, token, ticket
