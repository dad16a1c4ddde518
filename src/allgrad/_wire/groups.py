"""Process groups: their ranks, the backends that carry their tensors, and how callers name them."""

from __future__ import annotations

import contextlib
import enum
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from allgrad._core.call_queue import Queue
from allgrad._core.torch_internals import (
    backend_device_types,
    backend_for,
    constant_in_graphs,
    process_group_named,
)
from allgrad.errors import GroupError

if TYPE_CHECKING:
    from collections.abc import Hashable

    from allgrad._wire.topology import Topology

__all__ = [
    "Backend",
    "Group",
    "GroupLike",
    "ReduceOpLike",
    "calls_made",
    "find_group",
    "is_alone",
    "world_group",
    "world_rank",
    "world_size",
    "world_store",
]

GroupLike: TypeAlias = dist.ProcessGroup | DeviceMesh | tuple[DeviceMesh, str] | None
ReduceOpLike: TypeAlias = dist.ReduceOp | dist.ReduceOp.RedOpType

_CPU = torch.device("cpu")
AGREEMENT = "agreement"  # of checked mode, among the operations of a group


class Backend(enum.Enum):
    """The kinds of backend that algorithms are chosen by."""

    GLOO = "gloo"
    NCCL = "nccl"
    OTHER = "other"


class Group:
    """The ranks of one process group, and which of them this process is.

    The process group is held weakly: graphs and cached pairs must not keep a destroyed one alive.
    """

    __slots__ = (
        *("__weakref__", "_device_types", "_name", "_ref"),
        *("backends", "calls", "disagreements", "doing", "empty_calls"),
        *("exchanged", "exchanges", "failed"),
        *("last_exchange", "order", "orders", "queue", "rank", "registered"),
        *("since", "size", "successors", "thread", "topology", "waiting"),
    )

    def __init__(
        self,
        ref: weakref.ref[dist.ProcessGroup] | None,
        rank: int = 0,
        size: int = 1,
        name: str = "",
    ) -> None:
        """A group by reference; while it is traced by name; by neither it is a world of one."""
        self._ref, self._name = ref, name
        self._device_types: list[str] | None = None
        self.backends: dict[torch.device, Backend] = {}  # those asked for so far
        self.calls = 0  # on the wire, so far,
        self.doing = "", -1  # the last of them, and its src or dst
        self.exchanges = 0  # how many of them were pairwise all_to_alls
        # Calls in which this rank had nothing to send, and what it brought to them.
        self.empty_calls: deque[tuple[int, str]] = deque(maxlen=4)
        self.exchanged: deque[tuple[Any, ...]] = deque(maxlen=4)  # those with counts (wait_spec)
        self.last_exchange: Hashable = None  # of equal blocks,
        self.successors: dict[Hashable, Hashable] = {}  # and which one came after which (repeated)
        self.orders: dict[torch.device, Any] = {}  # how calls go backward (call_order)
        self.order: Any = None  # the one of tensors on the host,
        self.thread: Any = None  # and the thread that made its calls
        self.queue = Queue()  # of its async calls
        self.disagreements = 0  # in checked mode, seen by every rank
        self.failed = False  # whether a message was lost: its ranks may meet no more
        self.registered = False  # whether the store knows this process (diagnosis.register),
        self.since = 0  # and the ticks of the store until then
        # Its last call, what fits that of the other ranks, and since when it waits for them (watchdog).
        self.waiting: tuple[Any, Any, float] | None = None
        self.topology: Topology | None = None  # found out by the first call (hosts.find_topology)
        self.rank, self.size = rank, size

    @property
    def process_group(self) -> Any:
        """The process group; ``GroupError`` when it was destroyed."""
        if self._name:
            return process_group_named(self._name)
        found = None if self._ref is None else self._ref()
        if found is None and self._ref is not None:
            raise GroupError(
                "The process group of this call was destroyed.\n"
                "Run backward before destroy_process_group()."
            )
        return found

    @property
    def host_backend(self) -> Any:
        """The backend of tensors on the host. Its own sends and receives take half as long as the
        process group's. Not kept: it would outlive the process group.
        """
        return backend_for(self.process_group, _CPU)

    @property
    def members(self) -> list[int]:
        """The ranks of the group, numbered as in the whole world."""
        if self._name:
            return list(_ranks_named(self._name))
        return dist.get_process_group_ranks(self.process_group)

    @property
    def name(self) -> str:
        """The group's name in torch's registry; empty for a world of one."""
        name: str = self._name or ("" if self._ref is None else self.process_group.group_name)
        return name

    def backend(self, device: torch.device) -> Backend:
        """The kind of backend that carries tensors of this device."""
        found = self.backends.get(device)
        if found is None:
            found = self.backends[device] = _kind(self.process_group, device)
        return found

    def message_device(self, device: torch.device) -> torch.device:
        """Where small messages live: on the host if the group carries that, else on ``device``.

        A group that carries only another device type gets its messages there.
        """
        if self.size == 1 or self.carries("cpu"):
            return _CPU
        if self.carries(device.type):
            return device
        assert self._device_types is not None
        return torch.device(self._device_types[0])

    def carries(self, device_type: str) -> bool:
        """Tell whether a backend of the group carries tensors of this type of device."""
        if self._device_types is None:
            types = backend_device_types(self.process_group)
            self._device_types = [torch.device(kind).type for kind in types]
        return device_type in self._device_types


@constant_in_graphs
def _ranks_named(name: str) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(process_group_named(name)))


def _kind(process_group: Any, device: torch.device) -> Backend:
    try:
        backend = backend_for(process_group, device)
    except RuntimeError as error:
        raise GroupError(
            f"The group's backend {dist.get_backend(process_group)!r} carries no {device.type} "
            f"tensors.\nMove the tensor, or start the group with a backend for {device.type}."
        ) from error
    # From torch 2.15 on, NCCL may be called nccl2 or nccl-lazy.
    names = f"{backend.name()} {type(backend).__name__}".lower()
    for kind in (Backend.GLOO, Backend.NCCL):
        if kind.value in names:
            return kind
    return Backend.OTHER


_ALONE = Group(None)
LIVE: weakref.WeakSet[Group] = weakref.WeakSet()  # the groups that calls were made on
REGISTERED: weakref.WeakSet[Group] = weakref.WeakSet()  # the same, and those known by name


# All of them, for as long as their process groups live: made anew on one rank, a group would begin to count
# again (test_a_group_outlives_the_use_of_many_others).
_GROUPS: dict[weakref.ref[dist.ProcessGroup], Group] = {}


def _forget(ref: weakref.ref[dist.ProcessGroup]) -> None:
    _GROUPS.pop(ref).queue.thread = None  # it ends, even if cached pairs keep the group


def _group_of(process_group: dist.ProcessGroup) -> Group:
    found = _GROUPS.get(weakref.ref(process_group))
    if found is None:
        ref = weakref.ref(process_group, _forget)
        made = Group(ref, process_group.rank(), process_group.size())
        found = _GROUPS.setdefault(ref, made)  # another thread may have been first
        LIVE.add(found)
    return found


def find_group(call: str, group: GroupLike) -> Group:
    """The group meant by whatever the caller passed as ``group``."""
    if group is None:
        process_group = dist.group.WORLD
        # TorchDynamo 2.11 traces WORLD as a group even where there is none.
        if process_group is None or (
            torch.compiler.is_dynamo_compiling() and not dist.is_initialized()
        ):
            return _ALONE
    elif isinstance(group, dist.ProcessGroup):
        process_group = group
    else:
        process_group = _process_group_of(call, group)
    if torch.compiler.is_dynamo_compiling():
        # By name: what is traced may have to be made again outside the graph, as in lockstep, and
        # TorchDynamo 2.12 cannot make a process group (test_lockstep_around_a_compiled_function).
        return Group(None, process_group.rank(), process_group.size(), process_group.group_name)
    found = _group_of(process_group)
    if found.rank < 0:
        raise _not_a_member(call)
    return found


def is_alone(call: str, group: GroupLike) -> bool:
    """Tell whether the group has no other rank; asked for before an operation as short as a kernel."""
    if group is None and dist.group.WORLD is None:
        return True
    return find_group(call, group).size == 1


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


def calls_made() -> dict[str, int]:
    """How many wire calls this rank has made on each group, by the group's name."""
    made = {}
    for group in list(LIVE):
        with contextlib.suppress(GroupError):  # it was destroyed
            if not _name_was_reused(group):
                made[group.name] = group.calls
    return made


def _name_was_reused(group: Group) -> bool:
    """Tell whether a group of a later world has this one's name.

    A destroyed group stays as long as the program holds it, or the traceback of an error does
    (test_calls_of_a_former_world_are_not_taken_for_those_of_this_one).
    """
    with contextlib.suppress(RuntimeError):  # no group has the name
        return process_group_named(group.name) is not group.process_group
    return False


def world_group() -> Any:
    """The process group of the whole world; ``None`` without a world."""
    return dist.group.WORLD if dist.is_initialized() else None


def world_store() -> Any:
    """The store that all ranks of the world share; ``None`` without a world."""
    world = world_group()
    return None if world is None else world.get_group_store()


def world_rank() -> int:
    """The rank of this process in the whole world."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """How many ranks the whole world has."""
    return dist.get_world_size() if dist.is_initialized() else 1
