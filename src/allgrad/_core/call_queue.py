"""Calls under way: one thread that makes them in the order they were asked for.

A collective pairs up with the other ranks' by order alone. So while a call is under way, later
ones wait for their turn behind it, whichever thread they come from.
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

__all__ = ["LINE", "depart", "free", "in_backward", "in_turn"]

T = TypeVar("T")


class _Line:
    def __init__(self) -> None:
        self.thread: ThreadPoolExecutor | None = None
        self.lock = threading.Lock()
        self.waiting = 0


LINE = _Line()
_HERE = threading.local()


def depart(call: Callable[[], T]) -> Future[T]:
    """Make a call on the other thread, after those before it, without recording a graph."""
    backward = in_backward()
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def run() -> T:
        _HERE.in_line, _HERE.in_backward = True, backward
        same_stream = contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)
        try:
            with torch.no_grad(), same_stream:
                return call()
        finally:
            with LINE.lock:
                LINE.waiting -= 1

    with LINE.lock:
        LINE.thread = LINE.thread or ThreadPoolExecutor(1, "allgrad")
        LINE.waiting += 1
        return LINE.thread.submit(run)


def free() -> bool:
    """Tell whether a call may be made here and now: none is under way, or this is its thread."""
    return not LINE.waiting or getattr(_HERE, "in_line", False)


def in_turn(call: Callable[[], T]) -> T:
    """Make a call here and now, or behind those that are under way."""
    return call() if free() else depart(call).result()


def in_backward() -> bool:
    """Tell whether this call belongs to a backward, wherever it runs."""
    if getattr(_HERE, "in_line", False):
        return bool(_HERE.in_backward)
    return in_backward_pass()
