"""Host and wall time of small calls with their gradient over real NCCL ranks, in one interleaved run.

    LD_PRELOAD=.../libnccl.so.2 NCCL_MULTI_RANK_GPU_ENABLE=1 python benchmarks/nccl_host_time.py

Several ranks may share one GPU from NCCL 2.30 on; then start the multi-process service first
(``nvidia-cuda-mps-control -d``), or a call waits for the time slices of the others. Host time: until
forward and backward have returned; wall: until the device has finished. Medians, of the slowest rank
in each round. "raw" is without autograd; "bare" is the same calls in an autograd.Function with nothing
else, which is what torch itself takes for a call with a backward. ``--backend gloo`` tries it on the host; ``--fake`` measures host time in one process,
on torch's backend that sends nothing.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import allgrad as ag
from allgrad.cli.bench.baselines import Implementation, implementations_of
from allgrad.cli.bench.cases import Case
from allgrad.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

NAMES = ("raw", "bare", "allgrad", "sizes found out", "nn", "functional")
LIMIT = 150.0


def runs(operation: str, device: str, rank: int, world: int) -> dict[str, Callable[[], object]]:
    """Forward and backward of each implementation, on a piece of 1 KiB."""
    found = dict(implementations_of(Case(operation, world, 1024), rank))
    found["bare"] = bare(found["raw"])
    if operation == "all_gather":
        found["sizes found out"] = Implementation(lambda xs: [ag.all_gather(xs[0])])
    x = torch.ones(4, 64, device=device, requires_grad=True)
    rows = 4 * world if operation == "all_gather" else 4
    g = torch.ones(rows, 64, device=device)
    return {name: partial(both_ways, found[name], x, g) for name in NAMES if name in found}


def bare(raw: Implementation) -> Implementation:
    """The raw calls inside an autograd.Function."""
    backward_of = raw.backward
    assert backward_of is not None

    class Bare(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
            return raw.forward([x])[0]

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # noqa: ARG004
            return backward_of([gradients[0]])[0]

    return Implementation(lambda xs: [Bare.apply(xs[0])])


def both_ways(implementation: Implementation, x: Tensor, g: Tensor) -> None:
    if implementation.backward is not None:
        with torch.no_grad():
            implementation.forward([x])
            implementation.backward([g])
        return
    (y,) = implementation.forward([x])
    torch.autograd.grad(y, x, g)


def measure(
    operation: str, device: str, rounds: int, calls: int
) -> dict[str, list[tuple[float, float]]]:
    """On one rank: host and wall seconds of each sample."""
    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(1)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    made = runs(operation, device, dist.get_rank(), dist.get_world_size())
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
    names, order = list(made), random.Random(0)  # noqa: S311 - the same on every rank
    for turn in range(rounds + 3):
        order.shuffle(names)
        for name in names:
            dist.barrier()
            wait()
            began = time.perf_counter()
            for _ in range(calls):
                made[name]()
            host = time.perf_counter() - began
            wait()
            if turn >= 3:
                samples[name].append((host / calls, (time.perf_counter() - began) / calls))
    return samples


def by_fake_backend(
    operation: str, world: int, rounds: int, calls: int
) -> list[dict[str, list[tuple[float, float]]]]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        return [measure(operation, "cpu", rounds, calls)]
    finally:
        dist.destroy_process_group()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--ranks", type=int, default=4)
    options.add_argument("--rounds", type=int, default=31)
    options.add_argument("--calls", type=int, default=5, help="in one sample")
    options.add_argument("--backend", default="nccl")
    options.add_argument("--fake", action="store_true")
    given = options.parse_args()
    device = "cuda" if given.backend == "nccl" and not given.fake else "cpu"
    print("| 1 KiB, forward + backward: host / wall, ms | " + " | ".join(NAMES) + " |")
    print("|---|" + "---|" * len(NAMES))
    for operation in ("all_gather", "all_reduce"):
        if given.fake:
            by_rank = by_fake_backend(operation, given.ranks, given.rounds, given.calls)
        else:
            about = given.rounds, given.calls
            by_rank = run_ranks(
                measure, given.ranks, operation, device, *about, backend=given.backend,
                timeout=LIMIT,
            )  # fmt: skip
        medians = {}
        for name in by_rank[0]:
            slowest = [
                [max(times) for times in zip(*one, strict=True)]
                for one in zip(*(rank[name] for rank in by_rank), strict=True)
            ]
            medians[name] = [1e3 * statistics.median(times) for times in zip(*slowest, strict=True)]
        cells = []
        for name in NAMES:
            if name not in medians:
                cells.append("")
                continue
            host, wall = medians[name]
            ratios = (
                f"{host / medians['raw'][0]:.2f} of raw, {host / medians['bare'][0]:.2f} of bare"
            )
            cells.append(f"{host:.3f} / {wall:.3f} ({ratios})")
        print(f"| {operation} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
