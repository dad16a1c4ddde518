"""A call: the group it runs on, with its name and source line for error messages.

A ``Call`` travels with a collective into its backward. When something goes wrong there, it still
tells which call it belongs to and, in checked mode, which line of the user's program made it.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import weakref
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from allgrad._core.call_queue import in_backward
from allgrad._core.torch_internals import constant_in_graphs, process_group_named, traced_frames
from allgrad._wire.groups import Group, GroupLike, find_group

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Hashable, Sequence
    from types import CodeType, FrameType

    from torch import Tensor

__all__ = [
    "OUTSIDE",
    "UNKNOWN_SHAPES",
    "Call",
    "are_described",
    "at_site",
    "call_site",
    "describe_calls",
    "describe_shapes",
    "error_site",
    "group_key",
    "locate_calls",
    "number_from",
    "of_flat",
    "of_graph",
    "of_stacked",
    "resolve",
    "shapes_of_graph",
]


class Call(NamedTuple):
    """One call of a collective on one group."""

    group: Group
    rank: int
    size: int
    name: str
    details: str = ""
    site: str = ""
    serial: int = 0
    traced: Any = None  # in a graph: a list, empty until the first node of the call is made
    nest: str = ""  # the keys of a nest's tensors: of one call on every rank, if they are equal


_describing = _locating = 0
_serials: weakref.WeakKeyDictionary[Group, int] = weakref.WeakKeyDictionary()


def describe_calls(wanted: bool) -> None:
    """Ask for details and source lines of calls, or no longer. They cost microseconds a call."""
    global _describing  # noqa: PLW0603
    _describing += 1 if wanted else -1


def are_described() -> bool:
    """Tell whether details of calls are asked for."""
    return _describing > 0


def locate_calls(wanted: bool) -> None:
    """Ask for the source lines of calls alone, or no longer. They cost a microsecond a call."""
    global _locating  # noqa: PLW0603
    _locating += 1 if wanted else -1


_GROUP, _ProcessGroup = dist.group, dist.ProcessGroup


def group_key(group: GroupLike) -> Hashable:
    """A key of a process group, valid as long as it lives; ``None`` for anything else.

    Also ``None`` while calls are described or traced: then each call is resolved anew. While they
    are located, calls from different lines have different keys: a ``Call`` has one line.
    """
    # In this order TorchDynamo guards on neither state: a graph is not compiled again for it.
    if torch.compiler.is_dynamo_compiling() or _describing:
        return None
    found = _GROUP.WORLD if group is None else group
    key = weakref.ref(found) if isinstance(found, _ProcessGroup) else None
    if key is None or not _locating:
        return key
    try:
        frame = sys._getframe(3)  # noqa: SLF001 - of the line that called the collective, mostly
    except ValueError:  # called by no Python
        return key, call_site()
    known = _SITES.get((id(frame.f_code), frame.f_lasti))
    return key, _new_site(frame) if known is None else known[1]


def resolve(name: str, group: GroupLike, details: Callable[[], str] | None = None) -> Call:
    """Make a call on the group that the caller named.

    ``details`` tells what must be the same on every rank: reduction, shapes, src.
    """
    found = find_group(name, group)
    if torch.compiler.is_compiling():
        described = "" if details is None else details()
        return Call(found, found.rank, found.size, name, described, traced_site(), 0, [])
    if not _describing:
        return Call(found, found.rank, found.size, name, "", call_site() if _locating else "")
    described = "" if details is None else details()
    serial = _serials[found] = _serials.get(found, 0) + 1
    return Call(found, found.rank, found.size, name, described, call_site(), serial)


def number_from(group: Group, serial: int) -> None:
    """Count the group's calls from here on: some ranks may have made calls that others did not."""
    _serials[group] = serial


def of_graph(  # noqa: PLR0917
    xs: Sequence[Tensor], group: str, name: str, nest: str, details: str, site: str, first: bool
) -> Call:
    """The call of a node in a graph that runs on ``xs``; their shapes belong to the details.

    The first node of a call counts it, as ``resolve`` does. In backward the number is not known: 0.
    """
    found = find_group(name, process_group_named(group)) if group else find_group(name, None)
    if site == OUTSIDE and not in_backward():
        site = call_site()
    if not _describing:
        return Call(found, found.rank, found.size, name, "", site, nest=nest)
    for free_dim in _SHAPES_OF_GRAPH.findall(details):
        if free_dim == _FLAT:
            shapes = UNKNOWN_SHAPES
        elif free_dim == _STACKED:
            shapes = describe_shapes([x.new_empty(x.shape[1:], device="meta") for x in xs])
        else:
            shapes = describe_shapes(xs, int(free_dim) if free_dim else None)
        details = details.replace(shapes_of_graph(free_dim), shapes)
    if first:
        _serials[found] = _serials.get(found, 0) + 1
    return Call(found, found.rank, found.size, name, details, site, nest=nest)


_STACKED, _FLAT = "stacked", "flat"
_SHAPES_OF_GRAPH = re.compile(rf"<shapes (-?\d*|{_STACKED}|{_FLAT})>")
UNKNOWN_SHAPES = "shapes unknown"  # in the details of a call, where no rank's shapes are compared


def shapes_of_graph(free_dim: object) -> str:
    """Stands for shapes that are known when the graph runs."""
    return f"<shapes {'' if free_dim is None else free_dim}>"


def of_stacked(call: Call) -> Call:
    """The same call, whose node in a graph runs on its tensors with a dimension before the first."""
    return _with_shapes(call, _STACKED)


def of_flat(call: Call) -> Call:
    """The same call, whose nodes in a graph run on vectors: they cannot tell the caller's shapes."""
    return _with_shapes(call, _FLAT)


def _with_shapes(call: Call, kind: str) -> Call:
    details = call.details.replace(shapes_of_graph(None), shapes_of_graph(kind))
    if details == call.details:
        return call
    # Not _replace: what TorchDynamo 2.11 makes of it outside the graph has no fields
    # (test_lockstep_around_a_compiled_function).
    return Call(*call[:4], details, *call[5:])


def describe_shapes(xs: Sequence[Tensor], free_dim: int | None = None) -> str:
    """Shapes and dtypes in words, as checked mode compares them: a free dim is left open."""
    words = []
    for x in xs:
        lengths = ["?"] if x.is_nested else [str(n) for n in x.shape]
        if free_dim is not None and -len(lengths) <= free_dim < len(lengths):
            lengths[free_dim] = "*"
        words.append(f"({', '.join(lengths)}) {str(x.dtype).removeprefix('torch.')}")
    return "; ".join(words)


_OWN_FILES = str(Path(__file__).parent.parent) + os.sep
_COMMANDS = _OWN_FILES + "cli" + os.sep  # programs of users, as it were
_TORCH_FILES = str(Path(torch.__file__).parent) + os.sep


class _Thread(threading.local):
    """The line of the graph's node that this thread runs."""

    site: str | None = None


_sites_of_graphs = _Thread()
# Lines found before, by code and instruction. A code object is found by its id and kept: its hash reads
# all of it.
_SITES: dict[tuple[int, int], tuple[CodeType, str]] = {}
_MOST_SITES = 4096


@contextlib.contextmanager
def at_site(site: str) -> Generator[None]:
    """Let calls be made from this line: that of a node of a graph, which runs them."""
    _sites_of_graphs.site = None if site == OUTSIDE and not in_backward() else site
    try:
        yield
    finally:
        _sites_of_graphs.site = None


def call_site() -> str:
    """The line of the user's program that is running: the innermost outside allgrad and torch."""
    if _sites_of_graphs.site is not None:
        return _sites_of_graphs.site
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        file = frame.f_code.co_filename
        if _is_users(file):
            return _site(file, frame.f_lineno)
        frame = frame.f_back
    return "an unknown line"


def _new_site(frame: FrameType) -> str:
    """The same, and remember it if the line is in this frame."""
    site, code = call_site(), frame.f_code
    # A node of a graph has the line where it was made, and is called by no line of the user's.
    if _is_users(code.co_filename) and _sites_of_graphs.site is None:
        if len(_SITES) >= _MOST_SITES:
            _SITES.clear()
        _SITES[id(code), frame.f_lasti] = code, site
    return site


def error_site(error: BaseException) -> str:
    """The line of the user's program that an error came from: the innermost on its way."""
    found, step = "", error.__traceback__
    while step is not None:
        file = step.tb_frame.f_code.co_filename
        if _is_users(file):
            found = _site(file, step.tb_lineno)
        step = step.tb_next
    return found


@lru_cache(maxsize=4096)
def _site(file: str, line: int) -> str:
    return f"{file}:{line}"


# The line of a call in a graph that none of the user's lines are part of, a compiled layer of ours: it is
# found when the graph runs; in backward it is not known.
OUTSIDE = "a line that calls the graph"


@constant_in_graphs
def traced_site() -> str:
    """The same for a line that a compiler traces. What calls the graph is another line each time."""
    frames = traced_frames()
    for frame in reversed(frames):
        if _is_users(frame.filename):
            return f"{frame.filename}:{frame.lineno}"
    return OUTSIDE if frames else call_site()


@lru_cache(maxsize=4096)
def _is_users(file: str) -> bool:
    if file.startswith(_COMMANDS):
        return True
    # The watcher of a call is entered through contextlib.
    return not file.startswith((_OWN_FILES, _TORCH_FILES, "<")) and file != contextlib.__file__
