"""Compiled calls beside the same calls in eager code and torch's functional collectives, compiled.

    python benchmarks/compiled.py [--ranks 2] [--seconds 3] [--calls N] [--sizes 4 64] [--only all_reduce]

Forward and backward over Gloo. "raw" is the backend's own call and its adjoint into memory that is kept,
without autograd and not compiled. "floor" is raw and an op in a compiled function that does nothing: the
least that the backend's call costs there. A sample is one function with N calls, each with its own input and between
two kernels, and one backward pass through all of them; its time is divided by N. Without ``--calls`` N is
10 up to 256 KiB, and 1 above: what torch does once for each compiled function, whatever is in it, is then
a tenth of it for each call, as in a model. With ``--calls 1`` all of it is in the one call.

The functions take turns, one sample each, in one run; the slowest rank of each sample, medians. Before torch
2.13 its functional all_reduce has no derivative: there it stands in an autograd.Function, both ways.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

import allgrad as ag
from allgrad.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

OPERATIONS = "all_reduce", "all_gather", "reduce_scatter", "all_to_all"
SIZES = 4, 64, 1024, 4096  # KiB
MANY_UP_TO = 256


def eager(name: str) -> Callable[[Tensor], Tensor]:
    equal: dict[str, Callable[[Tensor], Tensor]] = {
        "all_reduce": ag.all_reduce,
        "all_gather": lambda x: ag.all_gather(x, sizes="equal"),
        "reduce_scatter": lambda x: ag.reduce_scatter(x, sizes="equal"),
        "all_to_all": lambda x: ag.all_to_all(x, send_sizes="equal"),
    }
    return equal[name]


class FunctionalAllReduce(torch.autograd.Function):
    """For versions of torch whose own has no derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:  # noqa: ARG004
        return functional.all_reduce(x, "sum", dist.group.WORLD)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # noqa: ARG004
        return functional.all_reduce(g.contiguous(), "sum", dist.group.WORLD)


def torchs(name: str) -> Callable[[Tensor], Any]:
    world = dist.get_world_size()
    group = dist.group.WORLD
    has_derivative = torch.__version__ >= "2.13"
    theirs: dict[str, Callable[[Tensor], Any]] = {
        "all_reduce": (
            (lambda x: functional.all_reduce(x, "sum", group))
            if has_derivative
            else FunctionalAllReduce.apply
        ),
        "all_gather": lambda x: functional.all_gather_tensor_autograd(x, 0, group),
        "reduce_scatter": lambda x: functional.reduce_scatter_tensor_autograd(x, "sum", 0, group),
        "all_to_all": lambda x: functional.all_to_all_single_autograd(
            x, [len(x) // world] * world, [len(x) // world] * world, group
        ),
    }
    return theirs[name]


def raw(name: str, x: Tensor) -> Callable[[Tensor], Tensor]:
    """The backend's call and its adjoint, into memory that is kept."""
    world = dist.get_world_size()
    long, short = x.new_empty(len(x) * world), x.new_empty(len(x) // world)
    same, back = torch.empty_like(x), torch.empty_like(x)

    def reduce_twice(x: Tensor) -> Tensor:
        dist.all_reduce(same.copy_(x))
        dist.all_reduce(back.copy_(same))
        return back

    def gather(x: Tensor) -> Tensor:
        dist.all_gather_into_tensor(long, x)
        dist.reduce_scatter_tensor(back, long)
        return back

    def scatter(x: Tensor) -> Tensor:
        dist.reduce_scatter_tensor(short, x)
        dist.all_gather_into_tensor(back, short)
        return back

    def exchange(x: Tensor) -> Tensor:
        dist.all_to_all_single(same, x)
        dist.all_to_all_single(back, same)
        return back

    calls = {
        "all_reduce": reduce_twice,
        "all_gather": gather,
        "reduce_scatter": scatter,
        "all_to_all": exchange,
    }
    return calls[name]


def nothing() -> Callable[[Tensor], Tensor]:
    """An op that sends nothing, with a derivative: what any op in a compiled function costs."""

    def copy(x: Tensor) -> Tensor:
        return x.clone()

    copy.__annotations__ = {"x": Tensor, "return": Tensor}
    op = torch.library.custom_op("allgrad_benchmark::nothing", copy, mutates_args=())
    op.register_fake(torch.empty_like)
    op.register_autograd(lambda _, g: op(g))
    return op


def between(call: Callable[[Tensor], Any]) -> Callable[..., list[Any]]:
    """A function with a call for each of its inputs, between two kernels as in a model."""
    return lambda *xs: [call(x * 2) * 2 for x in xs]


def measure(
    names: Sequence[str], sizes: Sequence[int], seconds: float, calls: int | None
) -> list[tuple[str, int, int, dict[str, float]]]:
    rows, idle = [], nothing()
    for name, kib in product(names, sizes):
        torch._dynamo.reset()
        functions = {
            "compiled": torch.compile(between(eager(name)), fullgraph=True),
            "eager": between(eager(name)),
            "functional": torch.compile(between(torchs(name))),
            "nothing compiled": torch.compile(between(idle), fullgraph=True),
            "nothing eager": between(torch.clone),
        }
        n = calls or (10 if kib <= MANY_UP_TO else 1)
        xs = [torch.randn(kib * 256, requires_grad=True) for _ in range(n)]
        samples = {f: [torch.ones_like(y) for y in f(*xs)] for f in functions.values()}
        kept = raw(name, xs[0].detach())
        plain = [x.detach() for x in xs]
        for _ in range(5):
            turn(samples, xs)
        began = time.perf_counter()
        for _ in range(5):
            turn(samples, xs)
            turn_raw(kept, plain)
        each = torch.tensor((time.perf_counter() - began) / 5)
        dist.broadcast(each, 0)
        rounds = int(min(1000, max(30, seconds / each.item())))
        taken = [[*turn(samples, xs), turn_raw(kept, plain)] for _ in range(rounds)]
        times = torch.tensor(taken, dtype=torch.float64)
        dist.all_reduce(times, dist.ReduceOp.MAX)  # a sample ends with its slowest rank
        medians = times.median(0).values * 1e3 / n
        rows.append((name, kib, n, dict(zip([*functions, "raw"], medians.tolist(), strict=True))))
    return rows


def turn(
    samples: dict[Callable[..., list[Any]], list[Tensor]], xs: Sequence[Tensor]
) -> list[float]:
    """One sample of each function, forward and backward from these gradients."""
    times = []
    for function, gradients in samples.items():
        for x in xs:
            x.grad = None
        dist.barrier()
        began = time.perf_counter()
        torch.autograd.backward(function(*xs), gradients)
        times.append(time.perf_counter() - began)
    return times


def turn_raw(call: Callable[[Tensor], Tensor], xs: Sequence[Tensor]) -> float:
    dist.barrier()
    began = time.perf_counter()
    for x in xs:
        call(x)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each case")
    parser.add_argument("--calls", type=int, help="in one function")
    parser.add_argument("--only", nargs="+", choices=OPERATIONS, default=OPERATIONS)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="KiB")
    options = parser.parse_args()
    limit = 60 + len(options.only) * len(options.sizes) * (2 * options.seconds + 60)
    about = options.only, options.sizes, options.seconds, options.calls
    rows = run_ranks(measure, options.ranks, *about, timeout=limit)[0]
    sys.stdout.write(
        f"torch {torch.__version__}, {options.ranks} ranks, ms for each call. torch's own: what compiling "
        "a function with ops that do nothing adds to it\n"
    )
    for name, kib, n, ms in rows:
        compiled, plain, theirs = ms["compiled"], ms["eager"], ms["functional"]
        own = ms["nothing compiled"] - ms["nothing eager"]
        floor = ms["raw"] + ms["nothing compiled"]
        sys.stdout.write(
            f"{name:15s} {kib:5d} KiB x {n:<3d} compiled {compiled:8.3f}  eager {plain:8.3f}  "
            f"functional {theirs:8.3f}  raw {ms['raw']:8.3f}   / eager {compiled / plain:.2f}  / functional "
            f"{compiled / theirs:.2f}   floor / functional {floor / theirs:.2f}   torch's own {own:.3f}\n"
        )


if __name__ == "__main__":
    main()
