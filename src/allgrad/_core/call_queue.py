"""The queue of async calls: one thread runs them in the order they were started.

Ranks match their calls by order alone. So while a call is pending, later ones wait behind it,
whichever thread they come from.
"""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import torch

from allgrad._core.torch_internals import in_backward_pass

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["QUEUE", "in_backward", "in_turn", "is_free", "start"]

T = TypeVar("T")


class _Queue:
    def __init__(self) -> None:
        self.thread: ThreadPoolExecutor | None = None
        self.lock = threading.Lock()
        self.pending = 0


class _Thread(threading.local):
    """What this thread is: the defaults hold for every thread but the queue's."""

    in_queue = False
    in_backward = False


QUEUE = _Queue()
_HERE = _Thread()


def start(call: Callable[[], T]) -> Future[T]:
    """Run a call on the queue's thread, after those before it, without recording a graph."""
    backward = in_backward()
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def run() -> T:
        _HERE.in_queue, _HERE.in_backward = True, backward
        same_stream = contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)
        try:
            with torch.no_grad(), same_stream:
                return call()
        finally:
            with QUEUE.lock:
                QUEUE.pending -= 1

    with QUEUE.lock:
        QUEUE.thread = QUEUE.thread or ThreadPoolExecutor(1, "allgrad")
        QUEUE.pending += 1
        return QUEUE.thread.submit(run)


def is_free() -> bool:
    """Tell whether a call may run here and now: none is pending, or this is the queue's thread."""
    return not QUEUE.pending or _HERE.in_queue


def in_turn(call: Callable[[], T]) -> T:
    """Run a call here and now, or behind those that are pending."""
    return call() if is_free() else start(call).result()


def in_backward() -> bool:
    """Tell whether this call belongs to a backward, wherever it runs."""
    if QUEUE.pending and _HERE.in_queue:
        return _HERE.in_backward
    return in_backward_pass()
