"""A call: the group it runs on, with its name and source line for error messages.

A ``Call`` travels with a collective into its backward. When something goes wrong there, it still
tells which call it belongs to and, in checked mode, which line of the user's program made it.
"""

from __future__ import annotations

import os
import sys
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from allgrad._wire.groups import Group, GroupLike, find_group

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

__all__ = ["Call", "call_site", "describe_calls", "group_key", "resolve"]


class Call(NamedTuple):
    """One call of a collective on one group."""

    group: Group
    rank: int
    size: int
    name: str
    details: str = ""
    site: str = ""
    serial: int = 0


_describing = 0
_serials: weakref.WeakKeyDictionary[Group, int] = weakref.WeakKeyDictionary()


def describe_calls(wanted: bool) -> None:
    """Ask for details and source lines of calls, or no longer. They cost microseconds a call."""
    global _describing  # noqa: PLW0603
    _describing += 1 if wanted else -1


def group_key(group: GroupLike) -> weakref.ref[dist.ProcessGroup] | None:
    """A hashable key of a process group, valid as long as it lives; ``None`` for anything else.

    Also ``None`` while calls are described or traced: then each call is resolved anew.
    """
    if _describing or torch.compiler.is_dynamo_compiling():
        return None
    found = dist.group.WORLD if group is None else group
    return weakref.ref(found) if isinstance(found, dist.ProcessGroup) else None


def resolve(name: str, group: GroupLike, details: Callable[[], str] | None = None) -> Call:
    """Make a call on the group that the caller named.

    ``details`` tells what must be the same on every rank: reduction, shapes, src.
    """
    found = find_group(name, group)
    if not _describing or torch.compiler.is_compiling():
        return Call(found, found.rank, found.size, name)
    told = "" if details is None else details()
    serial = _serials[found] = _serials.get(found, 0) + 1
    return Call(found, found.rank, found.size, name, told, call_site(), serial)


_OWN_FILES = str(Path(__file__).parent.parent) + os.sep
_TORCH_FILES = str(Path(torch.__file__).parent) + os.sep


def call_site() -> str:
    """The line of the user's program that is running: the innermost outside allgrad and torch."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_OWN_FILES, _TORCH_FILES)) and not file.startswith("<"):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown line"
