"""Differentiable async calls that nobody has waited for yet, by group, in the order they were started.

Backward runs in the order in which calls were finished. That must be the same on every rank, wherever and on
whichever thread each waits. So a call is finished after all that were started before it in its group, and
before any other call of the group is made, with a gradient or without (a reentrant checkpoint makes its
calls without one, and again in backward):

    rank 0   start h    wait h    all_reduce              backward: all_reduce, then h, on both
    rank 1   start h    all_reduce (finishes h)   wait h

Nothing is lost: the messages of that other call would wait for those of the pending ones anyway.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import MutableMapping
    from typing import TypeAlias

    from allgrad._wire.groups import Group

    Started: TypeAlias = "list[weakref.ref[Waitable]]"

__all__ = ["STATE", "Waitable", "add", "finish", "forget"]


class Waitable(Protocol):
    """A handle."""

    def wait(self) -> object: ...

    def finish_in_place(self) -> None: ...


class _NoGroup:
    """Stands for the group of calls that send nothing."""


class _State:
    """What is pending in this process; calls look at ``count`` alone."""

    def __init__(self) -> None:
        self.count = 0
        # A handle may be freed, on any thread and inside these functions too. Count is never too low then.
        self.lock = threading.RLock()
        self.by_group: MutableMapping[object, Started] = weakref.WeakKeyDictionary()


STATE = _State()
_NO_GROUP = _NoGroup()


def add(group: Group | None, handle: Waitable) -> None:
    """Remember a call that has been started, as long as somebody holds its handle."""
    with STATE.lock:
        started = STATE.by_group.setdefault(group or _NO_GROUP, [])
        started.append(weakref.ref(handle, lambda ref: _remove(started, ref)))
        STATE.count += 1


def forget(group: Group | None, handle: Waitable) -> None:
    """The call is finished, or failed."""
    started = STATE.by_group.get(group or _NO_GROUP, [])
    for ref in list(started):
        if ref() is handle:
            _remove(started, ref)


def _remove(started: Started, ref: weakref.ref[Waitable]) -> None:
    # It may have left before: finished, or failed and waited for again.
    with STATE.lock, contextlib.suppress(ValueError):
        started.remove(ref)
        STATE.count -= 1


def finish(group: Group | None, before: Waitable | None = None, *, in_place: bool = False) -> None:
    """Finish the calls of a group: all of them, or those that were started before this one.

    ``in_place``: in backward they come where they were started, and not where they are finished.
    """
    handles = [ref() for ref in list(STATE.by_group.get(group or _NO_GROUP, ()))]
    older = handles[: handles.index(before)] if before in handles else handles * (before is None)
    for handle in older:
        if handle is not None:
            handle.finish_in_place() if in_place else handle.wait()
