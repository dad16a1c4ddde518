"""The only user of torch.distributed: groups, and plain tensors moved between ranks.

No gradients here. Every call takes flat contiguous memory (a tensor of one dimension) with counts
of elements by rank, leaves it as it was, and returns new memory. Six calls are enough: whatever
gathers, scatters or permutes is an ``all_to_all`` with the right counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from allgrad import graph_wire, plans
from allgrad.errors import GroupError
from allgrad.ragged import even

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = [
    "Group",
    "GroupLike",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "message_device",
    "reduce",
    "reduce_scatter",
    "resolve",
]

GroupLike: TypeAlias = "dist.ProcessGroup | DeviceMesh | tuple[DeviceMesh, str] | None"

_SUMMED_BY_BACKENDS = frozenset(
    {
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.complex64, torch.complex128),
        *(torch.int8, torch.uint8, torch.int32, torch.int64),
    }
)


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks that take part, and which of them this process is."""

    process_group: dist.ProcessGroup | None
    rank: int
    size: int

    def backend(self, device: torch.device) -> str:
        """Name the backend that carries tensors of this device."""
        if self.process_group is None:
            return "none"
        try:
            name: str = self.process_group._get_backend(device).name()  # noqa: SLF001
        except RuntimeError as error:
            raise GroupError(
                f"The group's backend {dist.get_backend(self.process_group)!r} carries no "
                f"{device.type} tensors.\nMove the tensor, or start the group with a backend "
                f"for {device.type}."
            ) from error
        return name

    @property
    def name(self) -> str:
        """What functional ops call the group."""
        assert self.process_group is not None
        return self.process_group.group_name


_ALONE = Group(None, 0, 1)


def resolve(op: str, group: GroupLike) -> Group:
    """Find the ranks meant by whatever the caller passed as ``group``."""
    if group is None:
        if not dist.is_initialized():
            return _ALONE
        process_group = dist.group.WORLD
    elif isinstance(group, dist.ProcessGroup):
        process_group = group
    else:
        process_group = _process_group_of(op, group)
    assert process_group is not None
    rank = process_group.rank()
    if rank < 0:
        raise _not_a_member(op)
    return Group(process_group, rank, process_group.size())


def _process_group_of(op: str, group: object) -> dist.ProcessGroup:
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise _not_a_member(op)
    mesh, axis = group if isinstance(group, tuple) and len(group) == 2 else (group, None)
    if not isinstance(mesh, DeviceMesh) or not (axis is None or isinstance(axis, str)):
        raise GroupError(
            f"{op}: group is {type(group).__name__}, which names no ranks.\n"
            'Give None, a ProcessGroup, a 1-D DeviceMesh, or (mesh, "axis").'
        )
    names = mesh.mesh_dim_names or ()
    if axis is None and mesh.ndim != 1:
        raise GroupError(
            f"{op}: a mesh of {mesh.ndim} dimensions has a group for each of its axes.\n"
            f"Give (mesh, axis) with one of {list(names) or 'its axis names'}."
        )
    if axis is not None and axis not in names:
        raise GroupError(f"{op}: the mesh has no axis {axis!r}.\nIts axes are {list(names)}.")
    if mesh.get_coordinate() is None:
        raise _not_a_member(op)
    found: dist.ProcessGroup = mesh.get_group(axis)
    return found


def _not_a_member(op: str) -> GroupError:
    return GroupError(
        f"{op}: this process (global rank {dist.get_rank()}) is not in the group.\n"
        "Call it on the group's own ranks only."
    )


def message_device(group: Group, device: torch.device) -> torch.device:
    """Where small messages between ranks live: on the host when the group can carry that."""
    cpu = torch.device("cpu")
    if group.process_group is None or cpu in group.process_group._device_types:  # noqa: SLF001
        return cpu
    return device


def all_reduce(group: Group, x: Tensor) -> Tensor:
    """Sum over ranks, on every rank."""
    if _stays_here(group, x):
        return x.clone()
    if graph_wire.in_graph(x):
        return graph_wire.all_reduce(x, group.name)
    if x.dtype not in _SUMMED_BY_BACKENDS:
        counts = even(x.numel(), group.size)
        return all_gather(group, reduce_scatter(group, x, counts), counts)
    out = x.clone()
    dist.all_reduce(out, group=group.process_group)
    return out


def broadcast(group: Group, x: Tensor, src: int) -> Tensor:
    """What ``src`` holds, on every rank."""
    if _stays_here(group, x):
        return x.clone()
    if graph_wire.in_graph(x):
        return graph_wire.broadcast(x, src, group.name)
    out = x.clone() if group.rank == src else torch.empty_like(x)
    dist.broadcast(_as_bytes(out), group_src=src, group=group.process_group)
    return out


def reduce(group: Group, x: Tensor, dst: int) -> Tensor:
    """Sum over ranks on ``dst``; zeros on the others."""
    if _stays_here(group, x):
        return x.clone()
    if graph_wire.in_graph(x):
        return graph_wire.reduce(x, dst, group.rank, group.size, group.name)
    way = plans.reduce(group.backend(x.device), group.size, x.nbytes)
    if way == "gather" or x.dtype not in _SUMMED_BY_BACKENDS:
        n, here = x.numel(), group.rank == dst
        send = [n if rank == dst else 0 for rank in range(group.size)]
        rows = all_to_all(group, x, send, [n if here else 0] * group.size)
        return rows.view(group.size, n).sum(0, dtype=x.dtype) if here else torch.zeros_like(x)
    out = x.clone()
    dist.reduce(out, group_dst=dst, group=group.process_group)
    return out if group.rank == dst else torch.zeros_like(x)


def all_to_all(group: Group, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """Block ``r`` of ``x`` to rank ``r``; the blocks received, in rank order."""
    if _stays_here(group, x):
        return x.clone() if group.size == 1 else x.new_empty(sum(receive))
    if graph_wire.in_graph(x):
        return graph_wire.all_to_all(x, send, receive, group.name)
    out = x.new_empty(sum(receive))
    width = x.element_size()
    dist.all_to_all_single(
        _as_bytes(out),
        _as_bytes(x),
        [count * width for count in receive],
        [count * width for count in send],
        group=group.process_group,
    )
    return out


def all_gather(group: Group, x: Tensor, counts: Sequence[int]) -> Tensor:
    """Every rank's block, in rank order, on every rank."""
    if _stays_here(group, x):
        return x.clone() if group.size == 1 else x.new_empty(sum(counts))
    if graph_wire.in_graph(x):
        return graph_wire.all_gather(x, counts, group.name)
    way = plans.all_gather(group.backend(x.device), counts, x.element_size())
    if way == "copies":
        return all_to_all(group, x.repeat(group.size), [x.numel()] * group.size, counts)
    out = x.new_empty(sum(counts))
    blocks = list(_as_bytes(out).split([count * x.element_size() for count in counts]))
    if way == "backend":
        dist.all_gather_into_tensor(_as_bytes(out), _as_bytes(x), group=group.process_group)
    elif way == "backend_list":
        dist.all_gather(blocks, _as_bytes(x), group=group.process_group)
    else:
        blocks[group.rank].copy_(_as_bytes(x))
        works = [
            dist.broadcast(block, group_src=rank, group=group.process_group, async_op=True)
            for rank, block in enumerate(blocks)
            if block.numel()
        ]
        for work in works:
            work.wait()
    return out


def reduce_scatter(group: Group, x: Tensor, counts: Sequence[int]) -> Tensor:
    """Block ``r`` of ``x``, summed over ranks, on rank ``r``."""
    if _stays_here(group, x):
        return x.clone() if group.size == 1 else x.new_empty(counts[group.rank])
    if graph_wire.in_graph(x):
        return graph_wire.reduce_scatter(x, counts, group.rank, group.name)
    own = counts[group.rank]
    way = plans.reduce_scatter(group.backend(x.device), counts)
    if way == "exchange" or x.dtype not in _SUMMED_BY_BACKENDS:
        rows = all_to_all(group, x, counts, [own] * group.size)
        return rows.view(group.size, own).sum(0, dtype=x.dtype)
    out = x.new_empty(own)
    if way == "backend":
        dist.reduce_scatter_tensor(out, x, group=group.process_group)
    else:
        dist.reduce_scatter(out, list(x.split(list(counts))), group=group.process_group)
    return out


def _stays_here(group: Group, x: Tensor) -> bool:
    """No communication: a world of one, or a meta tensor that only has a shape."""
    return group.size == 1 or x.is_meta


def _as_bytes(x: Tensor) -> Tensor:
    # Moving needs no arithmetic: as bytes every dtype travels on every backend, bit for bit
    # (test_every_dtype_travels). A single element counts as contiguous whatever its stride.
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)
