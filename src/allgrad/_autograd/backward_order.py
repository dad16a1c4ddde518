"""Lockstep: every rank goes backward through the same collectives, in exact reverse order.

Autograd runs a node's backward when all that used its results has run. So each collective of a
block takes a token, an empty tensor, from the one before it and hands one to the next:

    forward    x ... all_gather ---token---> all_reduce ---token---> all_gather ---token---> end
    backward         last     <------------           <------------ first       <------------ end

Starting from the last token, backward reaches every collective, the last one first, on every rank
alike. One whose result was not used gets zeros and takes part all the same.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import torch

from allgrad._autograd import transforms

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from torch import Tensor

    from allgrad._autograd.adjoint_pair import AdjointPair

__all__ = ["Chain", "growing"]


class Chain:
    """The collectives of a block, tied one behind the other."""

    def __init__(self) -> None:
        """Begin with none."""
        self._owed: list[Callable[[], object]] = []
        self._begin()

    def _begin(self) -> None:
        self._first = torch.empty(0, requires_grad=True)
        self._last = self._first

    @contextlib.contextmanager
    def growing(self) -> Generator[None]:
        """Within this block every collective of this thread is tied to the chain."""
        before = getattr(_GROWING, "chain", None)
        _GROWING.chain = self
        transforms.order(_tie_to_growing)
        try:
            yield
        finally:
            _GROWING.chain = before
            transforms.order(_tie_to_growing if before is not None else None)

    def apply(self, pair: AdjointPair, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run a pair as the next collective of the chain."""
        return self.thread(lambda token: _InOrder.apply(self, pair, token, *xs))  # type: ignore[no-untyped-call]

    def thread(self, node: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Make a node that takes the last token and gives the next, before its results."""
        self._last, *results = node(self._last)
        return tuple(results)

    def owe(self, wait: Callable[[], object]) -> None:
        """Remember a call under way: waited for at the end of the block, if not before."""
        self._owed.append(wait)

    def settle(self) -> None:
        """Wait for every call still under way, in the order they were started."""
        owed, self._owed = self._owed, []
        for wait in owed:
            wait()

    def take_end(self) -> tuple[Tensor, Tensor]:
        """Let go of the chain: its beginning, which backward must reach, and its end."""
        ends = self._first, self._last
        self._begin()
        return ends

    def ends(self) -> tuple[Tensor, Tensor]:
        """Where backward must arrive, and where it starts."""
        return self._first, self._last


_GROWING = threading.local()


def growing() -> Chain | None:
    """The chain to which this thread's collectives are tied, if any."""
    return getattr(_GROWING, "chain", None)


def _tie_to_growing(pair: AdjointPair, xs: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
    chain = growing()
    return None if chain is None else chain.apply(pair, xs)


class _InOrder(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, chain: Chain, pair: AdjointPair, token: Tensor, *xs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.chain, ctx.pair = chain, pair
        return token.new_empty(0), *transforms.unlinked(pair, xs)

    @staticmethod
    def backward(ctx: Any, token: Tensor, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return None, None, token, *transforms.apply(ctx.pair.adjoint, gradients)
        # With create_graph the adjoints are collectives of the chain too, for the next backward.
        with ctx.chain.growing():
            return None, None, token, *transforms.apply(ctx.pair.adjoint, gradients)
