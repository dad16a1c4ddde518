"""Give every rank the state of rank 0: allgrad's ``sync`` beside raw torch, in one interleaved run.

    python benchmarks/module_sync.py [--ranks 4] [--tensors 2000] [--kib 10] [--repeats 31]

Implementations, each in place on the module:

    sync        allgrad.module_state.sync
    coalesced   torch's own coalesced broadcast of the listed tensors, 250 MiB buffers
    flat        flattened and unflattened by hand around one broadcast for each dtype
    each        one broadcast for each tensor

A sample is the time of the slowest rank after a barrier; the order rotates. Values are checked after
every sample.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

from allgrad.module_state import sync
from allgrad.testing import run_ranks


def build(tensors: int, kib: int) -> nn.Module:
    """Tensors of mixed shapes and dtypes, ``kib`` KiB each on average."""
    module = nn.Module()
    per_child = 10
    for number in range(tensors):
        if number % per_child == 0:
            child = nn.Module()
            module.add_module(f"layer{number // per_child}", child)
        nbytes = kib * 1024 * (1 + number % 3) // 2
        dtype = torch.bfloat16 if number % 5 == 0 else torch.float32
        rows = (1, 4, 16)[number % 3]
        shape = (rows, nbytes // dtype.itemsize // rows)
        child.register_parameter(
            f"p{number % per_child}", nn.Parameter(torch.empty(shape, dtype=dtype))
        )
    return module


def listed(module: nn.Module) -> list[Tensor]:
    return [p.detach() for p in module.parameters()] + [b.detach() for b in module.buffers()]


def coalesced(module: nn.Module) -> None:
    dist._broadcast_coalesced(dist.group.WORLD, listed(module), 250 * 2**20, 0)


def flat(module: nn.Module) -> None:
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for x in listed(module):
        by_dtype.setdefault(x.dtype, []).append(x)
    for xs in by_dtype.values():
        buffer = torch.cat([x.reshape(-1) for x in xs])
        dist.broadcast(buffer, 0)
        for x, part in zip(xs, buffer.split([x.numel() for x in xs]), strict=True):
            x.copy_(part.view_as(x))


def each(module: nn.Module) -> None:
    for x in listed(module):
        dist.broadcast(x, 0)


IMPLEMENTATIONS = {"sync": sync, "coalesced": coalesced, "flat": flat, "each": each}


def measure(tensors: int, kib: int, repeats: int) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    module = build(tensors, kib)
    rank = dist.get_rank()
    times: dict[str, list[float]] = {name: [] for name in IMPLEMENTATIONS}
    names = list(IMPLEMENTATIONS)
    with torch.no_grad():
        for repeat in range(repeats + 1):
            turn = repeat % len(names)
            for name in names[turn:] + names[:turn]:
                for number, x in enumerate(listed(module)):
                    x.fill_(number % 100 + 100 * repeat if rank == 0 else -1)
                dist.barrier()
                start = time.perf_counter()
                IMPLEMENTATIONS[name](module)
                seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
                dist.all_reduce(seconds, dist.ReduceOp.MAX)
                for number, x in enumerate(listed(module)):
                    want = torch.tensor(number % 100 + 100 * repeat).to(x.dtype)
                    assert x.flatten()[[0, -1]].eq(want).all(), name
                if repeat:  # the first round warms up
                    times[name].append(seconds.item())
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tensors", type=int, default=2000)
    parser.add_argument("--kib", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=31)
    args = parser.parse_args()
    times = run_ranks(measure, args.ranks, args.tensors, args.kib, args.repeats, timeout=600)[0]
    medians = {name: statistics.median(samples) for name, samples in times.items()}
    print(f"{args.ranks} ranks, gloo, {args.tensors} tensors of {args.kib} KiB on average")
    for name, median in medians.items():
        ratio = medians["sync"] / median
        low, *_, high = statistics.quantiles(times[name], n=10)
        print(
            f"  {name:<10} {1e3 * median:8.1f} ms ({1e3 * low:.1f} - {1e3 * high:.1f})   sync / it = {ratio:.2f}"
        )


if __name__ == "__main__":
    main()
