"""Compiled calls beside the same calls in eager code and torch's functional collectives, compiled.

    python benchmarks/compiled.py [ranks] [seconds for each case]

Forward and backward over Gloo. They take turns, call by call, in one run; the slowest rank of each call,
medians. Needs torch 2.13, where torch's functional all_reduce has a derivative.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

import allgrad as ag
from allgrad.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

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


def nothing() -> Callable[[Tensor], Tensor]:
    """An op that sends nothing, with a derivative: what any op in a compiled function costs."""

    def copy(x: Tensor) -> Tensor:
        return x.clone()

    copy.__annotations__ = {"x": Tensor, "return": Tensor}
    op = torch.library.custom_op("allgrad_benchmark::nothing", copy, mutates_args=())
    op.register_fake(torch.empty_like)
    op.register_autograd(lambda _, g: op(g))
    return op


def between(call: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """The call between two kernels, as in a model."""
    return lambda x: call(x * 2) * 2


def measure(seconds: float) -> list[tuple[str, int, dict[str, float]]]:
    rows, idle = [], nothing()
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        for nbytes in BYTES:
            torch._dynamo.reset()
            ways = {
                "compiled": torch.compile(between(eager(name)), fullgraph=True),
                "eager": between(eager(name)),
                "functional": torch.compile(between(torchs(name))),
                "nothing compiled": torch.compile(between(idle), fullgraph=True),
                "nothing eager": between(torch.clone),
            }
            x = torch.randn(nbytes // 4, requires_grad=True)
            for _ in range(5):
                turn(ways, x)
            began = time.perf_counter()
            for _ in range(5):
                turn(ways, x)
            each = torch.tensor((time.perf_counter() - began) / 5)
            dist.broadcast(each, 0)
            rounds = int(min(1000, max(30, seconds / each.item())))
            times = torch.tensor([turn(ways, x) for _ in range(rounds)], dtype=torch.float64)
            dist.all_reduce(times, dist.ReduceOp.MAX)  # a call ends with its slowest rank
            medians = times.median(0).values * 1e3
            rows.append((name, nbytes, dict(zip(ways, medians.tolist(), strict=True))))
    return rows


def turn(ways: dict[str, Callable[[Tensor], Any]], x: Tensor) -> list[float]:
    """One call of each, forward and backward."""
    times = []
    for call in ways.values():
        x.grad = None
        dist.barrier()
        began = time.perf_counter()
        call(x).sum().backward()
        times.append(time.perf_counter() - began)
    return times


def main() -> None:
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 3.0
    rows = run_ranks(measure, ranks, seconds, timeout=60 + 32 * (seconds + 30))[0]
    sys.stdout.write(
        f"torch {torch.__version__}, {ranks} ranks, ms. torch's own: what compiling a function with an "
        "op that does nothing adds to it\n"
    )
    for name, nbytes, ms in rows:
        compiled, plain, theirs = ms["compiled"], ms["eager"], ms["functional"]
        own = ms["nothing compiled"] - ms["nothing eager"]
        sys.stdout.write(
            f"{name:15s} {nbytes >> 10:5d} KiB  compiled {compiled:8.3f}  eager {plain:8.3f}  "
            f"functional {theirs:8.3f}   / eager {compiled / plain:.2f}  / functional "
            f"{compiled / theirs:.2f}   torch's own {own:.3f}\n"
        )


if __name__ == "__main__":
    main()
