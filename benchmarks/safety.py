"""The cost of lockstep, deadline, checked and recorded, compared with the plain call, in one interleaved run.

    python benchmarks/safety.py [--ranks 4] [--repeats 101] [--kib 4 256 4096] [--modes recorded]

A sample is the mean time of twenty calls of all_gather, forward and backward, on the slowest rank, after
two calls of the same kind that are not timed: a program has a mode on for many calls, so its code is in
the caches. The order is shuffled in every turn, and each sample is compared with the plain one of its
turn: what else the machine does mostly cancels out. The cost is the median of these differences, with
its standard error. "plain again" is the plain call a second time: what it adds is noise, and the fastest
samples tell what a machine without other work would. Values are checked first.
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


RECORDERS: list[recording.Recorder] = []  # the file is made once for a program, not for each sample
CALLS, UNTIMED = 20, 2

IMPLEMENTATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": plain,
    "plain again": plain,
    "lockstep": in_lockstep,
    "deadline": within_deadline,
    "checked": when_checked,
    "recorded": plain,
}


def measure(kib: int, repeats: int, names: list[str]) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        RECORDERS[:] = [recording.Recorder(Path(folder), calls=1 << 16)]
        return times_of_all(kib, repeats, names)


def times_of_all(kib: int, repeats: int, names: list[str]) -> dict[str, list[float]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.full((kib * 256,), float(rank + 1), requires_grad=True)
    for name in names:
        time_of(name, x)
        assert torch.equal(x.grad, torch.full_like(x, float(world))), name
    times: dict[str, list[float]] = {name: [] for name in names}
    order = random.Random(0)  # noqa: S311 - same on each rank
    for _ in range(repeats):
        for name in order.sample(names, len(names)):
            slowest = torch.tensor([time_of(name, x)], dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            times[name].append(slowest.item())
    return times


def time_of(name: str, x: torch.Tensor) -> float:
    """Seconds of one call, the mean of several in a row."""
    implementation = IMPLEMENTATIONS[name]
    recording._switch(RECORDERS[0] if name == "recorded" else None)
    for call in range(UNTIMED + CALLS):
        if call == UNTIMED:
            dist.barrier()
            began = time.perf_counter()
        x.grad = None
        implementation(x)
    took = (time.perf_counter() - began) / CALLS
    recording._switch(None)
    return took


def median_with_error(samples: list[float]) -> tuple[float, float]:
    """The median and its standard error, from the spread that outliers leave alone."""
    middle = statistics.median(samples)
    spread = 1.4826 * statistics.median(abs(sample - middle) for sample in samples)
    return middle, 1.2533 * spread / len(samples) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=101)
    parser.add_argument("--kib", type=int, nargs="+", default=[4, 256, 4096])
    modes = list(IMPLEMENTATIONS)[1:]
    parser.add_argument("--modes", nargs="+", choices=modes, default=modes)
    options = parser.parse_args()
    names = ["plain", *options.modes]
    for kib in options.kib:
        times = run_ranks(measure, options.ranks, kib, options.repeats, names, timeout=600)[0]
        base, least = statistics.median(times["plain"]), min(times["plain"])
        print(f"all_gather forward and backward, {options.ranks} ranks, {kib} KiB a rank")
        for name, samples in times.items():
            pairs = zip(samples, times["plain"], strict=True)
            more, error = median_with_error([sample - plain for sample, plain in pairs])
            print(
                f"  {name:11} {statistics.median(samples) * 1e3:8.3f} ms "
                f"{more * 1e6:+8.1f} us +- {error * 1e6:.1f} "
                f"{more / base * 100:+8.2f} % +- {error / base * 100:.2f}   "
                f"fastest {min(samples) * 1e3:8.3f} ms   x {min(samples) / least:.3f}"
            )


if __name__ == "__main__":
    main()
