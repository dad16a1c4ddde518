"""Starting and stopping a world of ranks, and the one sum that checks need.

A world is torch's default process group and every group made under it. The ranks meet at a
``Rendezvous``, a store that outlives them: a rank that dies takes no other rank's store with it.
"""

from __future__ import annotations

import contextlib
import gc
import socket
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

# Its functions take the group that is the default one when it is first imported, and TorchDynamo
# imports it: then not inside a world that ends
# (test_default_group_of_torch_functions_is_the_current_world).
import torch.distributed.nn.functional
from torch.distributed import PrefixStore, ProcessGroup, TCPStore  # type: ignore[attr-defined]

from allgrad._core.torch_internals import sequence_number
from allgrad._wire.groups import find_group

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ProcessGroup", "Rendezvous", "World", "rank_of", "size_of", "stop", "sum_over_ranks"]


class Rendezvous:
    """A store on a free port of this address; nobody outside can reach the loopback's."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        listener = socket.create_server((address, 0), backlog=512)
        self.address = address
        self.port: int = listener.getsockname()[1]
        self._store = TCPStore(
            address,
            self.port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


@dataclass(frozen=True, slots=True)
class World:
    """One rank's place in a started world."""

    rank: int
    size: int
    default: ProcessGroup

    @classmethod
    def start(
        cls,
        rank: int,
        size: int,
        *,
        backend: str,
        port: int,
        name: str,
        address: str = "127.0.0.1",
    ) -> World:
        """Meet ``size - 1`` other ranks under ``name`` at the rendezvous; a former world ends."""
        stop()
        if "nccl" in backend:
            torch.cuda.set_device(rank % torch.cuda.device_count())
        store = PrefixStore(name, TCPStore(address, port, is_master=False))
        hook = sys.excepthook
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        sys.excepthook = hook  # torch wraps it once more at every start
        default = dist.group.WORLD
        assert default is not None
        return cls(rank, size, default)

    def untouched(self) -> bool:
        """Tell whether this is still the default group, the only one, and works."""
        if dist.group.WORLD is not self.default or dist.distributed_c10d.get_pg_count() > 1:
            return False
        return not find_group("world", self.default).failed

    def calls(self) -> int:
        """Count the calls this rank has put on the default group."""
        return sequence_number(self.default)


def stop() -> None:
    """End this rank's world, so that its peers see closed connections instead of waiting.

    A backend closes its connections when its last reference goes, hence the collection.
    """
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):  # a peer that has gone is no reason to stay
            dist.destroy_process_group()
    gc.collect()


def rank_of(group: ProcessGroup | None = None) -> int:
    """Give this process's rank in the group; 0 when no world is started."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def size_of(group: ProcessGroup | None = None) -> int:
    """Count the ranks of the group; 1 when no world is started."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def sum_over_ranks(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Give every rank the sum of ``x`` over ranks, as a new tensor without gradient."""
    if not dist.is_initialized():
        return x.detach().clone()
    carried = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    total = x.detach().to(carried, copy=True)
    dist.all_reduce(total, group=group)
    return total.to(x.device)
