"""Blocks of the program that change how calls run, and which of them a call is in.

    thread 1      with deadline(50): ---------------
    thread 2                  with deadline(30): ------------------
    thread 3      no deadline | 50  |       30                    | no deadline

A block holds for the whole process. A call is in the innermost block of its own thread, if that has one, else
in the one opened last of those that are open, in whatever order blocks of several threads end.

An async call is in the blocks of the place where it was started, wherever and whenever it runs; a block is over
when it was left and the last such call is done.
"""

from __future__ import annotations

import contextlib
import threading
from threading import get_ident
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from typing import TypeAlias

    Held: TypeAlias = "dict[Blocks[Any], Block[Any]]"

__all__ = ["Block", "Blocks", "hold_current", "inside", "let_go"]

T = TypeVar("T")


class Block(Generic[T]):
    """A block, which gives the calls in it a value; ``None`` changes nothing."""

    __slots__ = ("thread", "users", "value")

    def __init__(self, value: T | None) -> None:
        """A block of this thread."""
        self.thread, self.value = get_ident(), value
        self.users = 1  # the thread that is in it, and async calls


class _Thread(threading.local):
    """The blocks of the async call that this thread runs, if it does."""

    held: Held | None = None


_HERE = _Thread()
_KINDS: list[Blocks[Any]] = []


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
        # Replaced, never changed: read without the lock.
        self._open: tuple[Block[T], ...] = ()
        self._left: tuple[Block[T], ...] = ()  # those of async calls that are pending
        self._began, self._ended = began, ended
        self._lock = threading.RLock()
        _KINDS.append(self)

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
                self._left = (*self._left, block)
                self.let_go(block)

    def set_outside(self, value: T | None) -> None:
        """Give calls in no block a value."""
        with self._lock:
            self._outside = Block(value)
            self._update()

    def hold(self) -> Block[T]:
        """The block of a call that is started here, which is not over before ``let_go``."""
        with self._lock:
            block = self.current()
            block.users += 1
            return block

    def let_go(self, block: Block[T]) -> None:
        with self._lock:
            block.users -= 1
            if not block.users:
                self._left = tuple(one for one in self._left if one is not block)
                self._update()
                self._ended(block)

    def current(self) -> Block[T]:
        """The block of a call that is made here."""
        found = self.innermost()
        if found is not None:
            return found
        if _HERE.held is not None:
            return _HERE.held.get(self, self._outside)
        return (*self._open[-1:], self._outside)[0]

    def innermost(self) -> Block[T] | None:
        """The innermost block of this thread."""
        here = get_ident()
        return next((block for block in reversed(self._open) if block.thread == here), None)

    def value(self) -> T | None:
        """The value of a call that is made here."""
        return self.current().value if self.in_use else None

    def _update(self) -> None:
        blocks = (self._outside, *self._open, *self._left)
        self.in_use = any(block.value is not None for block in blocks)


def hold_current() -> Held:
    """The blocks of a call that is started here, to be run ``inside`` them."""
    return {blocks: blocks.hold() for blocks in _KINDS if blocks.in_use}


@contextlib.contextmanager
def inside(held: Held) -> Generator[None]:
    """Run a call inside the blocks that it was started in."""
    _HERE.held = held
    try:
        yield
    finally:
        _HERE.held = None
        let_go(held)


def let_go(held: Held) -> None:
    """Let the blocks of a call that is done, or could not be started, be over."""
    for blocks, block in held.items():
        blocks.let_go(block)
