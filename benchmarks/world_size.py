"""Host time and memory of every call by the number of ranks, on torch's fake backend, which sends nothing.

One process believes in W ranks; what is measured is the Python and C++ work of a call on the host.
Every row beside the raw call of torch.distributed and its differentiable versions, in one run. "raw,
in autograd" is the raw call inside an autograd.Function that does nothing else: what a call costs that
can be differentiated at all. A sample is the last of at least three calls in a row, which take at least
a millisecond: a call before them that touches megabytes, as a raw all_gather among thousands of ranks
does, leaves the caches cold. Memory is the peak of Python's own allocations in a call (tracemalloc): its
bookkeeping, not tensors.

    python benchmarks/world_size.py [--worlds 8,512,4096,16384] [--repeats 31] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import tracemalloc
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.nn import functional as nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import allgrad as ag
from allgrad._core.torch_internals import functional_collectives

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

ROWS, WIDTH = 2, 4
IN_A_ROW, SECONDS_IN_A_ROW = 3, 1e-3
ANCHOR = torch.empty(0, requires_grad=True)


class InAutograd(torch.autograd.Function):
    """A function of a tensor, made differentiable in the shortest way; never run backward."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:  # noqa: ARG004
        return run(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, None, Tensor]:  # noqa: ARG004
        return None, None, g


def raw_exchange(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x)
    return out


def raw_sum(x: Tensor) -> Tensor:
    out = x.clone()
    dist.all_reduce(out)
    return out


def raw_broadcast(x: Tensor) -> Tensor:
    out = x.clone()
    dist.broadcast(out, 0)
    return out


def raw_reduce(x: Tensor) -> Tensor:
    out = x.clone()
    dist.reduce(out, 0)
    return out


def in_autograd(run: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], object]:
    return lambda: InAutograd.apply(ANCHOR, run, x)


def checked(call: Callable[[], object]) -> Callable[[], object]:
    """The call with what the ranks agree on before it; the block itself costs nothing."""

    def run() -> object:
        with ag.checked():
            return call()

    return run


def calls(world: int) -> dict[str, Callable[[], object]]:
    """The calls measured in a world of this size: raw, ours, peers."""
    x, whole = torch.randn(ROWS, WIDTH), torch.randn(world, WIDTH)
    joined, part = torch.empty(ROWS * world, WIDTH), torch.empty(1, WIDTH)
    sizes, ones = [ROWS] * world, [1] * world
    group, pairs = dist.group.WORLD, [(0, 1), (1, 0)]
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    functional = functional_collectives()
    gathered = getattr(
        functional, "all_gather_single_autograd", functional.all_gather_tensor_autograd
    )
    scattered = getattr(
        functional, "reduce_scatter_single_autograd", functional.reduce_scatter_tensor_autograd
    )
    return {
        "all_gather: raw": lambda: gather(joined, x),
        "all_gather: raw, list": lambda: dist.all_gather(list(joined.split(ROWS)), x),
        "all_gather: equal": lambda: ag.all_gather(x, sizes="equal"),
        "all_gather: sizes given": lambda: ag.all_gather(x, sizes=sizes),
        "all_gather: found out": lambda: ag.all_gather(x),
        "all_gather: nn": lambda: nn.all_gather(x, group),
        "all_gather: functional": lambda: gathered(x, 0, group).wait(),
        "reduce_scatter: raw": lambda: scatter(part, whole),
        "reduce_scatter: raw, list": lambda: dist.reduce_scatter(part, list(whole.split(1))),
        "reduce_scatter: equal": lambda: ag.reduce_scatter(whole, sizes="equal"),
        "reduce_scatter: sizes given": lambda: ag.reduce_scatter(whole, sizes=ones),
        "reduce_scatter: found out": lambda: ag.reduce_scatter(whole),
        "reduce_scatter: functional": lambda: scattered(whole, "sum", 0, group).wait(),
        "all_to_all: raw": lambda: raw_exchange(whole),
        "all_to_all: raw, in autograd": in_autograd(raw_exchange, whole),
        "all_to_all: raw, sizes": lambda: dist.all_to_all_single(
            torch.empty_like(whole), whole, ones, ones
        ),
        "all_to_all: equal": lambda: ag.all_to_all(whole, send_sizes="equal"),
        "all_to_all: equal, no gradient": lambda: ag.all_to_all(
            whole, send_sizes="equal", grad="none"
        ),
        "all_to_all: sizes given": lambda: ag.all_to_all(whole, send_sizes=ones, recv_sizes=ones),
        "all_to_all: found out": lambda: ag.all_to_all(whole),
        "all_to_all: nn": lambda: nn.all_to_all_single(torch.empty_like(whole), whole),
        "all_reduce: raw": lambda: raw_sum(x),
        "all_reduce: raw, in autograd": in_autograd(raw_sum, x),
        "all_reduce": lambda: ag.all_reduce(x),
        "all_reduce: nn": lambda: nn.all_reduce(x),
        "broadcast: raw": lambda: raw_broadcast(x),
        "broadcast: raw, in autograd": in_autograd(raw_broadcast, x),
        "broadcast": lambda: ag.broadcast(x),
        "broadcast: nn": lambda: nn.broadcast(x, 0),
        "reduce: raw": lambda: raw_reduce(x),
        "reduce: raw, in autograd": in_autograd(raw_reduce, x),
        "reduce": lambda: ag.reduce(x),
        "reduce: no gradient": lambda: ag.reduce(x, grad="none"),
        "gather: raw, list": lambda: dist.gather(x, list(joined.split(ROWS))),
        "gather: equal": lambda: ag.gather(x, sizes="equal"),
        "gather: found out": lambda: ag.gather(x),
        "scatter: raw, list": lambda: dist.scatter(part, list(whole.split(1))),
        "scatter: equal": lambda: ag.scatter(whole, sizes="equal"),
        "scatter: found out": lambda: ag.scatter(whole),
        "shift: sizes given": lambda: ag.shift(x, sizes=sizes),
        "shift: found out": lambda: ag.shift(x),
        "permute: sizes given": lambda: ag.permute(x, pairs, sizes=sizes),
        "permute: found out": lambda: ag.permute(x, pairs),
        "scan": lambda: ag.scan(x),
        "share": lambda: ag.share(x),
        "split: equal": lambda: ag.split(whole, sizes="equal"),
        "gather_sizes": lambda: ag.gather_sizes(x),
        "all_reduce: checked": checked(lambda: ag.all_reduce(x)),
        "all_gather: equal, checked": checked(lambda: ag.all_gather(x, sizes="equal")),
        "all_gather: found out, checked": checked(lambda: ag.all_gather(x)),
        "all_to_all: equal, checked": checked(lambda: ag.all_to_all(whole, send_sizes="equal")),
        "all_to_all: found out, checked": checked(lambda: ag.all_to_all(whole)),
    }


def measure(world: int, repeats: int) -> dict[str, tuple[float, float]]:
    """Median microseconds of each call, all in turns, and KiB of its bookkeeping."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        made = calls(world)
        samples: dict[str, list[float]] = {name: [] for name in made}
        for turn in range(repeats + 1):
            for name, call in made.items():
                first = began = time.perf_counter()
                in_a_row = 0
                while in_a_row < IN_A_ROW or began - first < SECONDS_IN_A_ROW:
                    began = time.perf_counter()
                    call()
                    took = time.perf_counter() - began
                    in_a_row += 1
                if turn:
                    samples[name].append(took)
        return {
            name: (1e6 * statistics.median(samples[name]), bookkeeping(call))
            for name, call in made.items()
        }
    finally:
        dist.destroy_process_group()


def bookkeeping(call: Callable[[], object]) -> float:
    """KiB that Python allocates at most in a call."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    call()
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    return peak / 1024


def main() -> None:
    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(1)  # as torchrun sets it
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--worlds", default="8,512,4096,16384")
    options.add_argument("--repeats", type=int, default=31)
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    worlds = [int(world) for world in given.worlds.split(",")]
    measured = {world: measure(world, given.repeats) for world in worlds}
    print("| host time, us; KiB | " + " | ".join(f"{world} ranks" for world in worlds) + " |")
    print("|---|" + "---|" * len(worlds))
    for name in measured[worlds[0]]:
        cells = (f"{us:.0f}; {kib:.0f}" for us, kib in (measured[w][name] for w in worlds))
        print(f"| {name} | {' | '.join(cells)} |")
    if given.json is not None:
        given.json.write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
