"""Compiled calls beside the same calls in eager code and torch's functional collectives, compiled.

    python benchmarks/compiled.py [ranks] [seconds for each case]

Forward and backward over Gloo. The three take turns, call by call, in one run; medians by rank 0.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

import allgrad as ag
from allgrad.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

BYTES = (4 << 10, 64 << 10, 1 << 20, 4 << 20)


def eager(name: str) -> Callable[[Tensor], Tensor]:
    equal: dict[str, Callable[[Tensor], Tensor]] = {
        "all_reduce": ag.all_reduce,
        "all_gather": lambda x: ag.all_gather(x, sizes="equal"),
        "reduce_scatter": lambda x: ag.reduce_scatter(x, sizes="equal"),
        "all_to_all": lambda x: ag.all_to_all(x, send_sizes="equal"),
    }
    return equal[name]


def torchs(name: str) -> Callable[[Tensor], Any]:
    world = dist.get_world_size()
    group = dist.group.WORLD
    theirs: dict[str, Callable[[Tensor], Any]] = {
        "all_reduce": lambda x: functional.all_reduce(x, "sum", group),
        "all_gather": lambda x: functional.all_gather_tensor_autograd(x, 0, group),
        "reduce_scatter": lambda x: functional.reduce_scatter_tensor_autograd(x, "sum", 0, group),
        "all_to_all": lambda x: functional.all_to_all_single_autograd(
            x, [len(x) // world] * world, [len(x) // world] * world, group
        ),
    }
    return theirs[name]


def between(call: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """The call between two kernels, as in a model."""
    return lambda x: call(x * 2) * 2


def measure(seconds: float) -> list[tuple[str, int, float, float, float]]:
    rows = []
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        for nbytes in BYTES:
            torch._dynamo.reset()
            ways = {
                "compiled": torch.compile(between(eager(name)), fullgraph=True),
                "eager": between(eager(name)),
                "functional": torch.compile(between(torchs(name))),
            }
            x = torch.randn(nbytes // 4, requires_grad=name != "all_reduce")
            times: dict[str, list[float]] = {way: [] for way in ways}
            until = time.monotonic() + seconds
            go_on = torch.ones(1)
            while go_on.item():
                for way, call in ways.items():
                    # torch's functional all_reduce has no derivative: all_reduce is timed forward.
                    dist.barrier()
                    began = time.perf_counter()
                    y = call(x)
                    if x.requires_grad:
                        y.sum().backward()
                    times[way].append(time.perf_counter() - began)
                go_on.fill_(time.monotonic() < until or len(times["eager"]) < 7)
                dist.broadcast(go_on, 0)
            medians = [statistics.median(times[way][3:]) * 1e3 for way in ways]
            rows.append((name, nbytes, *medians))
    return rows


def main() -> None:
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 3.0
    rows = run_ranks(measure, ranks, seconds, timeout=60 + 32 * (seconds + 30))[0]
    sys.stdout.write(
        f"torch {torch.__version__}, {ranks} ranks, ms; compiled / eager, / functional\n"
    )
    for name, nbytes, compiled, plain, theirs in rows:
        sys.stdout.write(
            f"{name:15s} {nbytes >> 10:5d} KiB  compiled {compiled:8.3f}  eager {plain:8.3f}  "
            f"functional {theirs:8.3f}   {compiled / plain:.2f}  {compiled / theirs:.2f}\n"
        )


if __name__ == "__main__":
    main()
