"""Whom a call is among: the ranks of a group, and what the call is called.

A ``Group`` travels with a collective into its backward. So when something goes wrong there, it
still tells which call it belongs to and, while calls are checked, where in the user's program.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import weakref
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from allgrad._core.torch_internals import (
    backend_device_types,
    backend_for,
    constant_in_graphs,
    process_group_named,
    traced_frames,
)
from allgrad.errors import GroupError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

    from torch import Tensor

__all__ = [
    "Group",
    "GroupLike",
    "call_site",
    "describe_calls",
    "message_device",
    "named",
    "reference",
    "resolve",
    "shape_text",
    "shapes_in_graph",
    "traced_site",
    "world_rank",
    "world_store",
]

GroupLike: TypeAlias = "dist.ProcessGroup | DeviceMesh | tuple[DeviceMesh, str] | None"


class Group(NamedTuple):
    """The ranks that take part, which of them this process is, and in what call."""

    held: dist.ProcessGroup | weakref.ref[dist.ProcessGroup] | None
    rank: int
    size: int
    call: str
    facts: str = ""
    site: str = ""
    serial: int = 0
    traced: Any = None  # in graphs: a list, empty until the first op of the call is made

    @property
    def process_group(self) -> Any:
        """The group itself. Graphs and remembered calls hold it weakly: destroyed, it is to end."""
        if not isinstance(self.held, weakref.ref):
            return self.held
        found = self.held()
        if found is None:
            raise GroupError(
                f"{self.call}: the process group was destroyed since.\n"
                "Go backward before destroy_process_group()."
            )
        return found

    @property
    def members(self) -> list[int]:
        """The ranks of the group as the whole world counts them."""
        return dist.get_process_group_ranks(self.process_group)

    @property
    def name(self) -> str:
        """What functional ops call the group."""
        name: str = self.process_group.group_name
        return name

    def backend(self, device: torch.device) -> str:
        """Name the backend that carries tensors of this device."""
        try:
            return _backend_name(self.held, device)
        except RuntimeError as error:
            raise GroupError(
                f"{self.call}: the group's backend {dist.get_backend(self.process_group)!r} carries "
                f"no {device.type} tensors.\nMove the tensor, or start the group with a backend "
                f"for {device.type}."
            ) from error


@lru_cache(maxsize=256)
def _backend_name(held: Any, device: torch.device) -> str:
    group: Any = held() if isinstance(held, weakref.ref) else held
    return "" if group is None else str(backend_for(group, device).name())


def world_store() -> Any:
    """Where all ranks of the world can leave word for each other; ``None`` without a world."""
    world = dist.group.WORLD if dist.is_initialized() else None
    return None if world is None else world.get_group_store()


def world_rank() -> int:
    """Tell this process's rank in the whole world."""
    return dist.get_rank() if dist.is_initialized() else 0


_describing = 0
_serials: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def describe_calls(wanted: bool) -> None:
    """Ask for facts and sites of calls, or no longer; they cost microseconds, so nobody else pays."""
    global _describing  # noqa: PLW0603
    _describing += 1 if wanted else -1


def reference(group: GroupLike) -> weakref.ref[dist.ProcessGroup] | None:
    """What a process group can be known by as long as it lives; ``None`` for anything else.

    ``None`` too while calls are described, or traced: each is then looked at as it is.
    """
    if _describing or torch.compiler.is_dynamo_compiling():
        return None
    found = dist.group.WORLD if group is None else group
    return weakref.ref(found) if isinstance(found, dist.ProcessGroup) else None


def resolve(call: str, group: GroupLike, facts: Callable[[], str] | None = None) -> Group:
    """Find the ranks meant by whatever the caller passed as ``group``.

    ``facts`` tells what must be alike on every rank: reduction, shapes, src.
    """
    if group is None:
        process_group = dist.group.WORLD
        if process_group is None:
            return Group(None, 0, 1, call)
    elif isinstance(group, dist.ProcessGroup):
        process_group = group
    else:
        process_group = _process_group_of(call, group)
    rank = process_group.rank()
    if rank < 0:
        raise _not_a_member(call)
    if torch.compiler.is_compiling():
        told = "" if facts is None else facts()
        return Group(process_group, rank, process_group.size(), call, told, traced_site(), 0, [])
    held = weakref.ref(process_group)
    if not _describing:
        return Group(held, rank, process_group.size(), call)
    told = "" if facts is None else facts()
    serial = _serials[process_group] = _serials.get(process_group, 0) + 1
    return Group(held, rank, process_group.size(), call, told, call_site(), serial)


def named(xs: Sequence[Tensor], name: str, call: str, facts: str, site: str, first: bool) -> Group:
    """The group of a call in a graph, which keeps its name; ``facts`` gets the shapes of ``xs``.

    ``first`` counts the call, as ``resolve`` does. Backward does not know the number: it stays 0.
    """
    if not name:
        return Group(None, 0, 1, call)
    process_group = process_group_named(name)
    held, rank, size = weakref.ref(process_group), process_group.rank(), process_group.size()
    if not _describing:
        return Group(held, rank, size, call)
    for free_dim in _SHAPES_OF_GRAPH.findall(facts):
        text = shape_text(xs, int(free_dim) if free_dim else None)
        facts = facts.replace(shapes_in_graph(free_dim), text)
    if first:
        _serials[process_group] = _serials.get(process_group, 0) + 1
    return Group(held, rank, size, call, facts, site)


_SHAPES_OF_GRAPH = re.compile(r"<shapes (-?\d*)>")


def shapes_in_graph(free_dim: object) -> str:
    """Stands for shapes that are known when the graph runs."""
    return f"<shapes {'' if free_dim is None else free_dim}>"


def shape_text(xs: Sequence[Tensor], free_dim: int | None = None) -> str:
    """Shapes and dtypes in words, as they must be alike on every rank: a free dim is left open."""
    words = []
    for x in xs:
        lengths = [str(n) for n in x.shape]
        if free_dim is not None and -x.dim() <= free_dim < x.dim():
            lengths[free_dim] = "*"
        words.append(f"({', '.join(lengths)}) {str(x.dtype).removeprefix('torch.')}")
    return "; ".join(words)


def _process_group_of(call: str, group: object) -> dist.ProcessGroup:
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise _not_a_member(call)
    mesh, axis = group if isinstance(group, tuple) and len(group) == 2 else (group, None)
    if not isinstance(mesh, DeviceMesh) or not (axis is None or isinstance(axis, str)):
        raise GroupError(
            f"{call}: group is {type(group).__name__}, which names no ranks.\n"
            'Give None, a ProcessGroup, a 1-D DeviceMesh, or (mesh, "axis").'
        )
    names = mesh.mesh_dim_names or ()
    if axis is None and mesh.ndim != 1:
        raise GroupError(
            f"{call}: a mesh of {mesh.ndim} dimensions has a group for each of its axes.\n"
            f"Give (mesh, axis) with one of {list(names) or 'its axis names'}."
        )
    if axis is not None and axis not in names:
        raise GroupError(f"{call}: the mesh has no axis {axis!r}.\nIts axes are {list(names)}.")
    if mesh.get_coordinate() is None:
        raise _not_a_member(call)
    found: dist.ProcessGroup = mesh.get_group(axis)
    return found


def _not_a_member(call: str) -> GroupError:
    return GroupError(
        f"{call}: this process (global rank {dist.get_rank()}) is not in the group.\n"
        "Call it on the group's own ranks only."
    )


def message_device(group: Group, device: torch.device) -> torch.device:
    """Where small messages between ranks live: on the host when the group can carry that."""
    cpu = torch.device("cpu")
    if group.process_group is None or cpu in backend_device_types(group.process_group):
        return cpu
    return device


_OURS = str(Path(__file__).parent.parent) + os.sep
_TORCHS = str(Path(torch.__file__).parent) + os.sep


def call_site() -> str:
    """The line of the user's program that is running: the innermost one outside allgrad and torch."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        file = frame.f_code.co_filename
        if _is_users(file):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown place"


def _is_users(file: str) -> bool:
    return not file.startswith((_OURS, _TORCHS, "<")) and file != contextlib.__file__


@constant_in_graphs
def traced_site() -> str:
    """The same for a line that a compiler traces."""
    for frame in reversed(traced_frames()):
        if _is_users(frame.filename):
            return f"{frame.filename}:{frame.lineno}"
    return call_site()
