"""The queues of async calls, one for each group: a thread runs them in the order they were started.

Ranks match the calls of a group by order alone. So while one is pending, later ones of the same group
wait behind it, whichever thread they come from. Those of other groups do not: another rank may come to
them in another order.
"""

from __future__ import annotations

import contextlib
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import torch

from allgrad._core import blocks
from allgrad._core.torch_internals import in_backward_pass

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["QUEUES", "Queue", "in_backward", "in_turn", "is_free", "start"]

T = TypeVar("T")


class _Queues:
    """What is known of all of them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.pending = 0
        self.forks = 0  # a forked process has no threads of queues

    def forget_threads(self) -> None:
        self.lock, self.pending, self.forks = threading.Lock(), 0, self.forks + 1


class Queue:
    """The calls of one group."""

    __slots__ = ("forks", "pending", "thread")

    def __init__(self) -> None:
        """No call so far."""
        self.thread: ThreadPoolExecutor | None = None
        self.pending = self.forks = 0


class _Thread(threading.local):
    """What this thread is: the defaults hold for every thread but those of queues."""

    queue: Queue | None = None
    in_backward = False


QUEUES = _Queues()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=QUEUES.forget_threads)
_HERE = _Thread()


def start(call: Callable[[], T], queue: Queue) -> Future[T]:
    """Run a call on the queue's thread, after those before it, without recording a graph.

    It runs inside the blocks of now: when it runs, some ranks may have entered a checked block, or left
    one (test_a_call_pending_at_the_edge_of_a_block); and so may this one, a deadline
    (test_a_call_has_the_deadline_of_where_it_was_started).
    """
    backward, held = in_backward(), blocks.hold_current()
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def run() -> T:
        _HERE.queue, _HERE.in_backward = queue, backward
        same_stream = contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)
        try:
            with torch.no_grad(), same_stream, blocks.inside(held):
                return call()
        finally:
            with QUEUES.lock:
                QUEUES.pending -= 1
                queue.pending -= 1

    with QUEUES.lock:
        if queue.forks != QUEUES.forks:
            queue.thread, queue.pending, queue.forks = None, 0, QUEUES.forks
        queue.thread = queue.thread or ThreadPoolExecutor(1, "allgrad")
        QUEUES.pending += 1
        queue.pending += 1
        try:
            return queue.thread.submit(run)
        except BaseException:
            # No thread could be started. Another try would run this call too, which has raised here.
            QUEUES.pending -= 1
            queue.pending -= 1
            queue.thread = None
            blocks.let_go(held)
            raise


def is_free(queue: Queue) -> bool:
    """Tell whether a call may run here and now: none is pending, or this is the queue's thread."""
    return not queue.pending or _HERE.queue is queue


def in_turn(call: Callable[[], T], queue: Queue) -> T:
    """Run a call here and now, or behind those that are pending."""
    return call() if is_free(queue) else start(call, queue).result()


def in_backward() -> bool:
    """Tell whether this call belongs to a backward, wherever it runs."""
    if QUEUES.pending and _HERE.queue is not None:
        return _HERE.in_backward
    return in_backward_pass()
