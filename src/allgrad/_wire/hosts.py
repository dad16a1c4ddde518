"""Which ranks of a group are on which host: found out once, at the group's first call.

    rank 0   node-a        hosts   ((0, 1), (2, 3))
    rank 1   node-a        names   ("node-a", "node-b")
    rank 2   node-b
    rank 3   node-b

Ranks on one host share a kernel and its loopback. ``ALLGRAD_HOST=name`` says otherwise: ranks with
one name are on one host. Gloo's groups alone find it out; other backends know their links.
"""

from __future__ import annotations

import hashlib
import os
import socket
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from allgrad._wire import eager
from allgrad._wire.codec import Reader, Writer
from allgrad._wire.groups import Backend
from allgrad._wire.topology import ONE_HOST, Topology, by_host

if TYPE_CHECKING:
    from allgrad._wire.calls import Call

__all__ = ["find_topology"]

_ENVIRONMENT = "ALLGRAD_HOST"
_NAME = 64  # bytes
_WORDS = 16
_CPU = torch.device("cpu")


def find_topology(call: Call) -> Topology:
    """The topology of a call's group, found out by all of its ranks in their first call."""
    group = call.group
    if group.topology is None:
        by_gloo = (
            group.size > 1
            and group.message_device(_CPU) == _CPU
            and group.backend(_CPU) is Backend.GLOO
        )
        group.topology = _exchange(call) if by_gloo else ONE_HOST
    return group.topology


def _exchange(call: Call) -> Topology:
    writer = Writer("host")
    writer.number(os.getpid(), _host_key(), _cores())
    writer.text(_host_name(), _NAME)
    row = torch.tensor(writer.padded(_WORDS), dtype=torch.int64, device=_CPU)
    rows = eager.all_gather_by_copies(call, row, [_WORDS] * call.size).tolist()
    processes, keys, cores, names = [], [], [], []
    for rank in range(call.size):
        reader = Reader(rows[rank * _WORDS : (rank + 1) * _WORDS], "host", rank)
        processes.append(reader.number())
        keys.append(reader.number())
        cores.append(reader.number())
        names.append(reader.text(_NAME))
    hosts = by_host(keys)
    crowded = any(cores[rank] < len(ranks) for ranks in hosts for rank in ranks)
    return Topology(hosts, tuple(names[ranks[0]] for ranks in hosts), tuple(processes), crowded)


def _cores() -> int:
    """How many cores this process may use; ranks that are bound to one each count as crowded."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _host_name() -> str:
    return os.environ.get(_ENVIRONMENT) or socket.gethostname()


def _host_key() -> int:
    given = os.environ.get(_ENVIRONMENT)
    text = "\n".join(("named", given) if given else _kernel())
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@lru_cache(maxsize=1)
def _kernel() -> tuple[str, ...]:
    """Tells this running kernel and its loopback from any other, where the system can say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return boot, str(Path("/proc/self/ns/net").readlink())
    except OSError:
        return (socket.gethostname(),)
