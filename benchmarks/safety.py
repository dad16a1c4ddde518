"""The cost of lockstep, deadline, checked and recorded, compared with the plain call, in one interleaved run.

    python benchmarks/safety.py [--ranks 4] [--repeats 41] [--kib 4 256 4096]

A sample is the mean time of ten calls of all_gather, forward and backward, on the slowest rank, after
one call of the same kind that is not timed: a program has a mode on for many calls, so its code is in
the caches. The order is shuffled in every turn. "plain again" is the plain call a second time: what it
adds is noise, and the fastest samples tell what a machine without other work would. Values are checked
first.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

import allgrad as ag
from allgrad._wire import recording
from allgrad.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable


def plain(x: torch.Tensor) -> torch.Tensor:
    y = ag.all_gather(x, sizes="equal")
    y.sum().backward()
    return y


def in_lockstep(x: torch.Tensor) -> torch.Tensor:
    with ag.lockstep() as step:
        y = ag.all_gather(x, sizes="equal")
    step.backward(y.sum())
    return y


def within_deadline(x: torch.Tensor) -> torch.Tensor:
    with ag.deadline(60):
        return plain(x)


def when_checked(x: torch.Tensor) -> torch.Tensor:
    with ag.checked():
        return plain(x)


def when_recorded(x: torch.Tensor) -> torch.Tensor:
    recording._switch(RECORDERS[0])  # the file is made once for a program, not for each call
    try:
        return plain(x)
    finally:
        recording._switch(None)


RECORDERS: list[recording.Recorder] = []
CALLS = 10

IMPLEMENTATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": plain,
    "plain again": plain,
    "lockstep": in_lockstep,
    "deadline": within_deadline,
    "checked": when_checked,
    "recorded": when_recorded,
}


def measure(kib: int, repeats: int) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        RECORDERS[:] = [recording.Recorder(Path(folder), calls=1 << 16)]
        return times_of_all(kib, repeats)


def times_of_all(kib: int, repeats: int) -> dict[str, list[float]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.full((kib * 256,), float(rank + 1), requires_grad=True)
    for name, implementation in IMPLEMENTATIONS.items():
        x.grad = None
        implementation(x)
        assert torch.equal(x.grad, torch.full_like(x, float(world))), name
    times: dict[str, list[float]] = {name: [] for name in IMPLEMENTATIONS}
    names, order = list(IMPLEMENTATIONS), random.Random(0)  # noqa: S311 - same on each rank
    for _ in range(repeats):
        for name in order.sample(names, len(names)):
            took = time_of(IMPLEMENTATIONS[name], x)
            slowest = torch.tensor([took], dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            times[name].append(slowest.item())
    return times


def time_of(implementation: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> float:
    """Seconds of one call, the mean of several in a row."""
    for call in range(CALLS + 1):
        if call == 1:
            dist.barrier()
            began = time.perf_counter()
        x.grad = None
        implementation(x)
    return (time.perf_counter() - began) / CALLS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=41)
    parser.add_argument("--kib", type=int, nargs="+", default=[4, 256, 4096])
    options = parser.parse_args()
    for kib in options.kib:
        times = run_ranks(measure, options.ranks, kib, options.repeats, timeout=600)[0]
        base = statistics.median(times["plain"])
        print(f"all_gather forward and backward, {options.ranks} ranks, {kib} KiB a rank")
        for name, samples in times.items():
            # Each sample beside the plain call of its turn: what else the machine does cancels out.
            pairs = zip(samples, times["plain"], strict=True)
            more = statistics.median(sample - plain for sample, plain in pairs)
            middle = statistics.median(samples)
            factor, fastest = 1 + more / base, min(samples)
            least = f"fastest {fastest * 1e3:8.3f} ms   x {fastest / min(times['plain']):.3f}"
            print(
                f"  {name:11} {middle * 1e3:8.2f} ms   x {factor:.3f} {more * 1e6:+8.0f} us   {least}"
            )


if __name__ == "__main__":
    main()
