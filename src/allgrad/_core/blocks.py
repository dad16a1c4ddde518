"""Blocks of the program that change how calls run, and which of them a call is in.

    thread 1      with deadline(50): ---------------
    thread 2                  with deadline(30): ------------------
    thread 3      no deadline | 50  |       30                    | no deadline

A block holds for the whole process. A call is in the innermost block of its own thread, if that has one, else
in the one opened last of those that are open, in whatever order blocks of several threads end.
"""

from __future__ import annotations

import contextlib
import threading
from threading import get_ident
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

__all__ = ["Block", "Blocks"]

T = TypeVar("T")


class Block(Generic[T]):
    """A block, which gives the calls in it a value; ``None`` changes nothing."""

    __slots__ = ("thread", "value")

    def __init__(self, value: T | None) -> None:
        """A block of this thread."""
        self.thread, self.value = get_ident(), value


class Blocks(Generic[T]):
    """The blocks of one kind. ``in_use``: whether any call, of whatever thread, has another value than ``None``."""

    def __init__(
        self,
        outside: T | None = None,
        began: Callable[[], None] = lambda: None,
        ended: Callable[[Block[T]], None] = lambda _: None,
    ) -> None:
        """None so far. Calls in no block have the value ``outside``."""
        self.in_use = outside is not None
        self._outside = Block(outside)
        self._open: tuple[Block[T], ...] = ()  # replaced, never changed: read without the lock
        self._began, self._ended = began, ended
        self._lock = threading.RLock()

    @contextlib.contextmanager
    def open(self, value: T | None) -> Generator[None]:
        """Open a block of this thread."""
        block = Block(value)
        with self._lock:
            self._open = (*self._open, block)
            self._update()
            self._began()
        try:
            yield
        finally:
            with self._lock:
                self._open = tuple(one for one in self._open if one is not block)
                self._update()
                self._ended(block)

    def current(self) -> Block[T]:
        """The block of a call that is made here."""
        return self.innermost() or (*self._open[-1:], self._outside)[0]

    def innermost(self) -> Block[T] | None:
        """The innermost block of this thread."""
        here = get_ident()
        return next((block for block in reversed(self._open) if block.thread == here), None)

    def value(self) -> T | None:
        """The value of a call that is made here."""
        return self.current().value if self.in_use else None

    def _update(self) -> None:
        self.in_use = any(block.value is not None for block in (self._outside, *self._open))
