"""Bytes that cross the links between hosts, from the interfaces' own counters, headers included.

    python benchmarks/link_bytes.py [--hosts 2] [--ranks-per-host 4] [--sizes 256KiB,4MiB]

Every call beside the raw one of torch.distributed; figures are multiples of what must leave the
busiest host. Needs root on Linux: hosts are network namespaces.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

import allgrad as ag
from allgrad.cli.bench.show import format_bytes, parse_bytes
from allgrad.testing import Hosts

if TYPE_CHECKING:
    from collections.abc import Callable

CALLS = 5


def calls(elements: int) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """Raw and ours, of a piece of so many elements."""
    x, world = torch.ones(elements), dist.get_world_size()
    joined, part = torch.empty(world * elements), torch.empty(elements // world)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return {
        "all_gather": (lambda: gather(joined, x), lambda: ag.all_gather(x, sizes="equal")),
        "reduce_scatter": (lambda: scatter(part, x), lambda: ag.reduce_scatter(x, sizes="equal")),
        "all_reduce": (lambda: dist.all_reduce(x.clone()), lambda: ag.all_reduce(x)),
        "broadcast": (lambda: dist.broadcast(x, 0), lambda: ag.broadcast(x)),
    }


def must_leave(operation: str, nbytes: int, hosts: int, ranks_per_host: int) -> float:
    """Bytes that have to leave the busiest host in one call."""
    others = hosts - 1
    return {
        "all_gather": ranks_per_host * nbytes * others,
        "reduce_scatter": nbytes / hosts * others,
        "all_reduce": 2 * nbytes * others / hosts,
        "broadcast": nbytes * others,
    }[operation]


def run(operation: str | None, elements: int, ours: bool) -> None:
    """On every rank."""
    if operation is not None:
        for _ in range(CALLS):
            calls(elements)[operation][ours]()


def sent(hosts: Hosts, operation: str | None, elements: int, ours: bool) -> int:
    """Bytes that the busiest host sends in all calls."""
    before = [hosts.bytes_sent(host) for host in range(len(hosts.names))]
    hosts.run(run, operation, elements, ours)
    return max(hosts.bytes_sent(host) - count for host, count in enumerate(before))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--hosts", type=int, default=2)
    options.add_argument("--ranks-per-host", type=int, default=4)
    options.add_argument("--sizes", default="4KiB,64KiB,256KiB,1MiB,4MiB")
    given = options.parse_args()
    sizes = [parse_bytes(word) for word in given.sizes.split(",")]
    print("| raw / allgrad | " + " | ".join(format_bytes(size) for size in sizes) + " |")
    print("|---|" + "---|" * len(sizes))
    with Hosts(given.hosts, ranks_per_host=given.ranks_per_host) as hosts:
        sent(hosts, "all_reduce", 1, True)  # connect, and find out who is where
        idle = sent(hosts, None, 1, True)
        for operation in ("all_gather", "reduce_scatter", "all_reduce", "broadcast"):
            cells = []
            for size in sizes:
                must = CALLS * must_leave(operation, size, given.hosts, given.ranks_per_host)
                raw, ours = (
                    (sent(hosts, operation, size // 4, o) - idle) / must for o in (False, True)
                )
                cells.append(f"{raw:.2f} / {ours:.2f}")
            print(f"| `{operation}` | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
