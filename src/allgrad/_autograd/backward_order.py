"""Lockstep: every rank runs backward through the same collectives, in exact reverse order.

Autograd runs a node's backward once everything that used its results has run. So each collective
of a block takes a token, an empty tensor, from the one before it and hands one to the next:

    forward    x ... all_gather ---token---> all_reduce ---token---> all_gather ---token---> end
    backward         last     <------------           <------------ first       <------------ end

From the last token, backward reaches every collective, the last one first, on every rank alike.
One whose result was not used gets zeros and takes part all the same.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import torch

from allgrad._autograd import checkpoints, transforms
from allgrad._core.torch_internals import below_view_tracking, is_view

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from torch import Tensor

    from allgrad._autograd.adjoint_pair import AdjointPair

__all__ = ["Chain", "current_chain"]


class Chain:
    """The collectives of a block, tied one behind the other."""

    def __init__(self) -> None:
        """Begin with none."""
        self._pending: list[Callable[[], object]] = []
        self._begin()

    def _begin(self) -> None:
        self._first = torch.empty(0, device="cpu", requires_grad=True)
        self._last = self._first

    @contextlib.contextmanager
    def recording(self) -> Generator[None]:
        """Within this block every collective of this thread is tied to the chain."""
        block = (self,)  # one chain may record in several blocks: an object for each
        _THREAD.blocks = (*_THREAD.blocks, block)
        _count_recording(1)
        try:
            yield
        finally:
            # Blocks of generators may end in any order (test_blocks_of_one_thread_end_in_any_order).
            _THREAD.blocks = tuple(one for one in _THREAD.blocks if one is not block)
            _count_recording(-1)

    def apply(self, pair: AdjointPair, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run a pair as the next collective of the chain."""
        return self.append(lambda token: _InOrder.apply(self, pair, token, *xs))  # type: ignore[no-untyped-call]

    def append(self, node: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Add a node that takes the last token and gives the next, before its results."""
        self._last, *results = node(self._last)
        return tuple(results)

    def tie(self, node: Callable[[Tensor], tuple[Tensor | None, ...]]) -> tuple[Tensor | None, ...]:
        """Add a node that takes the last token as its anchor, and gives results alone."""
        results = node(self._last)
        self._last, *handed_on = _HandOn.apply(*(x for x in results if x is not None))  # type: ignore[no-untyped-call]
        made = iter(handed_on)
        return tuple(None if x is None else next(made) for x in results)

    def add_pending(self, wait: Callable[[], object]) -> None:
        """Remember a pending call: the end of the block waits for it, if nobody did before."""
        self._pending.append(wait)

    def wait_for_pending(self) -> None:
        """Wait for every call that is still pending, in the order they were started."""
        pending, self._pending = self._pending, []
        for wait in pending:
            wait()

    def take_ends(self) -> tuple[Tensor, Tensor]:
        """Let go of the chain: its beginning, which backward must reach, and its end."""
        ends = self._first, self._last
        self._begin()
        return ends

    def ends(self) -> tuple[Tensor, Tensor]:
        """Where backward must arrive, and where it starts."""
        return self._first, self._last


class _Thread(threading.local):
    """The blocks of this thread that record, the last one begun last."""

    blocks: tuple[tuple[Chain], ...] = ()


_THREAD = _Thread()
_LOCK = threading.Lock()
_recording = 0  # blocks of all threads


def _count_recording(change: int) -> None:
    """Hook into the collectives while some thread records a chain.

    A block that ends in one thread must not untie those of another
    (test_a_block_of_another_thread_leaves_this_one_tied).
    """
    global _recording  # noqa: PLW0603
    with _LOCK:
        _recording += change
        transforms.order_with(current_chain if _recording else None)


def current_chain() -> Chain | None:
    """The chain to which this thread's collectives are tied, if any.

    Not what a checkpoint calls again in a backward inside of the block (test_backward_inside_of_a_block).
    """
    blocks = _THREAD.blocks
    return blocks[-1][0] if blocks and not checkpoints.is_recomputing() else None


class _HandOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *results: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG004
        # Not as views, which could not be changed in place; what is a view already stays one.
        with below_view_tracking():
            handed_on = [y if is_view(y) else y.detach() for y in results]
        return torch.empty(0, device="cpu"), *handed_on

    @staticmethod
    def backward(ctx: Any, token: Tensor, *gradients: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG004
        return gradients


class _InOrder(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, chain: Chain, pair: AdjointPair, token: Tensor, *xs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.chain, ctx.pair = chain, pair
        results = transforms.run_map(pair, xs)
        checkpoints.mark(ctx)
        return token.new_empty(0), *results

    @staticmethod
    def backward(ctx: Any, token: Tensor, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        checkpoints.come_to(ctx)
        if not torch.is_grad_enabled():
            return None, None, token, *transforms.apply_adjoint(ctx.pair, gradients)
        # With create_graph the adjoints are collectives of the chain too, for the next backward.
        with ctx.chain.recording():
            return None, None, token, *transforms.apply_adjoint(ctx.pair, gradients)
