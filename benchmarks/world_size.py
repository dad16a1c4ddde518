"""Host time of a call by the number of ranks, on torch's fake backend, which sends nothing.

One process believes in W ranks; what is measured is the Python and C++ work of a call on the host.
Every row beside the raw call of torch.distributed, in one interleaved run.

    python benchmarks/world_size.py [--worlds 8,64,512,4096] [--repeats 51]
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import allgrad as ag

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS, WIDTH = 2, 4


def calls(world: int) -> dict[str, Callable[[], object]]:
    """The calls measured in a world of this size; raw ones first."""
    x = torch.randn(ROWS, WIDTH)
    gathered = torch.empty(ROWS * world, WIDTH)
    whole = torch.randn(world, WIDTH)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    sizes = [ROWS] * world
    return {
        "raw all_gather": lambda: gather(gathered, x),
        "all_gather, sizes found out": lambda: ag.all_gather(x),
        "all_gather, sizes given": lambda: ag.all_gather(x, sizes=sizes),
        "all_gather, equal": lambda: ag.all_gather(x, sizes="equal"),
        "raw all_reduce": lambda: dist.all_reduce(x.clone()),
        "all_reduce": lambda: ag.all_reduce(x),
        "reduce_scatter, found out": lambda: ag.reduce_scatter(whole),
        "reduce_scatter, equal": lambda: ag.reduce_scatter(whole, sizes="equal"),
        "broadcast": lambda: ag.broadcast(x),
        "gather_sizes": lambda: ag.gather_sizes(x),
    }


def measure(world: int, repeats: int) -> dict[str, float]:
    """Median microseconds of each call, all in turns."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        made = calls(world)
        samples: dict[str, list[float]] = {name: [] for name in made}
        for turn in range(repeats + 3):
            for name, call in made.items():
                began = time.perf_counter()
                call()
                if turn >= 3:
                    samples[name].append(time.perf_counter() - began)
        return {name: 1e6 * statistics.median(times) for name, times in samples.items()}
    finally:
        dist.destroy_process_group()


def main() -> None:
    torch.set_num_threads(1)  # as torchrun sets it
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--worlds", default="8,64,512,4096")
    options.add_argument("--repeats", type=int, default=51)
    given = options.parse_args()
    worlds = [int(world) for world in given.worlds.split(",")]
    measured = {world: measure(world, given.repeats) for world in worlds}
    print("| host time, us | " + " | ".join(f"{world} ranks" for world in worlds) + " |")
    print("|---|" + "---|" * len(worlds))
    for name in measured[worlds[0]]:
        cells = " | ".join(f"{measured[world][name]:.0f}" for world in worlds)
        print(f"| {name} | {cells} |")


if __name__ == "__main__":
    main()
