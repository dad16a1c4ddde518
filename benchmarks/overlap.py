"""Overlap with ``async_op``: a call and a computation of the same length, in sequence and overlapped.

    python benchmarks/overlap.py [--ranks 2] [--mib 16] [--repeats 15] [--compute elsewhere|here]

``elsewhere`` computes off the host, like an accelerator: the host only waits. ``here`` multiplies
matrices on the cores that also move the bytes, so that nothing overlaps without spare cores. The
computation is as long as the call in the same run, in forward and in backward. A sample is the time
of the slowest rank after a barrier; the implementations alternate.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import allgrad as ag
from allgrad.testing import run_ranks

if TYPE_CHECKING:
    from torch import Tensor


def spend(seconds: float, where: str) -> None:
    if where == "elsewhere":
        time.sleep(seconds)
        return
    a, until = torch.ones(128, 128), time.perf_counter() + seconds
    while time.perf_counter() < until:
        a @ a


class Compute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: float, back: float, where: str) -> Tensor:
        ctx.back, ctx.where = back, where
        spend(there, where)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        spend(ctx.back, ctx.where)
        return g, None, None, None


def once(implementation: str, x: Tensor, w: Tensor, load: tuple[float, float, str]) -> list[float]:
    """Seconds of the forward and of the backward."""
    dist.barrier()
    began = time.perf_counter()
    results = []
    if implementation == "call":
        results = [ag.all_gather(x, sizes="equal")]
    elif implementation == "computation":
        results = [Compute.apply(w, *load)]
    elif implementation == "one after the other":
        results = [ag.all_gather(x, sizes="equal"), Compute.apply(w, *load)]
    else:
        handle: Any = ag.all_gather(x, sizes="equal", async_op=True)
        computed = Compute.apply(w, *load)
        results = [handle.wait(), computed]
    between = time.perf_counter()
    torch.autograd.backward([y.sum() for y in results])
    return [between - began, time.perf_counter() - between]


IMPLEMENTATIONS = ("call", "computation", "one after the other", "overlapped")


def measure(mib: int, repeats: int, where: str) -> dict[str, list[list[float]]]:
    torch.set_num_threads(1)
    x = torch.ones(mib * 2**18, requires_grad=True)
    w = torch.ones(1, requires_grad=True)
    alone = [once("call", x, w, (0, 0, where)) for _ in range(7)][2:]
    took = torch.tensor([statistics.median(column) for column in zip(*alone, strict=True)])
    dist.all_reduce(took, dist.ReduceOp.MAX)
    there, back = took.tolist()
    times: dict[str, list[list[float]]] = {implementation: [] for implementation in IMPLEMENTATIONS}
    for turn in range(repeats):
        for implementation in (
            IMPLEMENTATIONS[turn % len(IMPLEMENTATIONS) :]
            + IMPLEMENTATIONS[: turn % len(IMPLEMENTATIONS)]
        ):
            x.grad = None
            times[implementation].append(once(implementation, x, w, (there, back, where)))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--compute", choices=["elsewhere", "here"], default="elsewhere")
    args = parser.parse_args()
    by_rank = run_ranks(measure, args.ranks, args.mib, args.repeats, args.compute, timeout=900)
    print(f"{args.ranks} ranks, all_gather of {args.mib} MiB a rank, computation {args.compute}")
    medians = {}
    for implementation in IMPLEMENTATIONS:
        samples = zip(*(times[implementation] for times in by_rank), strict=True)
        slowest = [[max(part) for part in zip(*ranks, strict=True)] for ranks in samples]
        medians[implementation] = [
            statistics.median(column) for column in zip(*slowest, strict=True)
        ]
    longer = [max(medians["call"][i], medians["computation"][i]) for i in range(2)]
    for implementation, found in medians.items():
        print(
            f"  {implementation:<22} forward {1e3 * found[0]:7.1f} ms ({found[0] / longer[0]:.2f} x the longer)"
            f"   backward {1e3 * found[1]:7.1f} ms ({found[1] / longer[1]:.2f} x)"
        )


if __name__ == "__main__":
    main()
