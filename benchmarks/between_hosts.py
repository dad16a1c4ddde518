"""Every collective between hosts, forward and backward, beside the raw call and what the link must take.

    python benchmarks/between_hosts.py [--hosts 2] [--ranks-per-host 4] [--link 200mbit] [--sizes 256KiB,1MiB]
        [--only all_reduce,shift] [--repeats 5]

Interleaved, in a new order each round; medians of the slowest rank. "in autograd" is the raw call inside an
autograd.Function that does nothing else: what a call costs that can be differentiated at all. "link" is the time that the bytes which
must enter or leave the busiest host take at the link's rate. Ragged: the last rank has eight times as
much. Raw calls are given all sizes; where there is none, what is used in its place is named. Needs
root on Linux: hosts are network namespaces. With fewer cores than ranks, ``chrt -r 1`` keeps a rank from being
interrupted while it holds a connection, at which another thread of its process would spin.
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
from allgrad.cli.bench.show import format_bytes, parse_bytes
from allgrad.testing import Hosts

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

UNITS = {"kbit": 1e3 / 8, "mbit": 1e6 / 8, "gbit": 1e9 / 8}


def gather(x: Tensor) -> Tensor:
    out = x.new_empty(len(x) * dist.get_world_size())
    dist.all_gather_into_tensor(out, x)
    return out


def scatter_sum(x: Tensor) -> Tensor:
    out = x.new_empty(len(x) // dist.get_world_size())
    dist.reduce_scatter_tensor(out, x)
    return out


def padded(x: Tensor, most: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, most - len(x)))


def gather_padded(x: Tensor, rows: list[int]) -> Tensor:
    most = max(rows)
    blocks = gather(padded(x, most)).split(most)
    return torch.cat([block[:n] for block, n in zip(blocks, rows, strict=True)])


def scatter_sum_padded(x: Tensor, rows: list[int]) -> Tensor:
    most = max(rows)
    blocks = [padded(block, most) for block in x.split(rows)]
    return scatter_sum(torch.cat(blocks))[: rows[dist.get_rank()]]


def all_sum(x: Tensor) -> Tensor:
    out = x.clone()
    dist.all_reduce(out)
    return out


def spread(x: Tensor) -> Tensor:
    out = torch.empty_like(x) if dist.get_rank() else x.clone()
    dist.broadcast(out, 0)
    return out


def sum_on_root(x: Tensor) -> Tensor:
    out = x.clone()
    dist.reduce(out, 0)
    return out.zero_() if dist.get_rank() else out


def to_root(x: Tensor) -> Tensor:
    out = x.new_empty(len(x) * dist.get_world_size() if dist.get_rank() == 0 else 0)
    dist.gather(x, list(out.split(len(x))) if dist.get_rank() == 0 else None)
    return out


def from_root(x: Tensor, n: int) -> Tensor:
    out = x.new_empty(n)
    dist.scatter(out, list(x.split(n)) if dist.get_rank() == 0 else None)
    return out


def move(x: Tensor, by: int) -> Tensor:
    rank, world, out = dist.get_rank(), dist.get_world_size(), torch.empty_like(x)
    sends = dist.P2POp(dist.isend, x, (rank + by) % world)
    recvs = dist.P2POp(dist.irecv, out, (rank - by) % world)
    for work in dist.batch_isend_irecv([sends, recvs]):
        work.wait()
    return out


def running_sum(x: Tensor, reverse: bool) -> Tensor:
    blocks, rank = gather(x).view(dist.get_world_size(), -1), dist.get_rank()
    return (blocks[rank:] if reverse else blocks[: rank + 1]).sum(0)


def exchange(x: Tensor, send: list[int], receive: list[int]) -> Tensor:
    out = x.new_empty(sum(receive))
    dist.all_to_all_single(out, x, receive, send)
    return out


Pair = tuple["Callable[[Tensor], Tensor]", "Callable[[Tensor], Tensor]"]


def cases(n: int) -> dict[str, tuple[int, Pair, Callable[[Tensor], Any]]]:
    """Elements of the input, raw forward and adjoint, and ours; ``n`` elements in the largest piece."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = [n // 8] * (world - 1) + [n]
    unit = n // (world + 7)
    send = [unit] * (world - 1) + [8 * unit]
    receive = [8 * unit if rank == world - 1 else unit] * world
    held = n * world if rank == 0 else 0
    root = to_root, partial(from_root, n=n)
    return {
        "all_gather": (n, (gather, scatter_sum), partial(ag.all_gather, sizes="equal")),
        "all_gather, ragged (raw: padded)": (
            rows[rank],
            (partial(gather_padded, rows=rows), partial(scatter_sum_padded, rows=rows)),
            partial(ag.all_gather, sizes=rows),
        ),
        "reduce_scatter": (
            n * world,
            (scatter_sum, gather),
            partial(ag.reduce_scatter, sizes="equal"),
        ),
        "reduce_scatter, ragged (raw: padded)": (
            sum(rows),
            (partial(scatter_sum_padded, rows=rows), partial(gather_padded, rows=rows)),
            partial(ag.reduce_scatter, sizes=rows),
        ),
        "all_reduce": (n, (all_sum, all_sum), ag.all_reduce),
        "broadcast": (n, (spread, sum_on_root), ag.broadcast),
        "reduce": (n, (sum_on_root, spread), ag.reduce),
        "all_to_all": (
            n,
            (partial(exchange, send=[n // world] * world, receive=[n // world] * world),) * 2,
            partial(ag.all_to_all, send_sizes="equal"),
        ),
        "all_to_all, ragged": (
            sum(send),
            (
                partial(exchange, send=send, receive=receive),
                partial(exchange, send=receive, receive=send),
            ),
            partial(ag.all_to_all, send_sizes=send, recv_sizes=receive),
        ),
        "gather": (n, root, partial(ag.gather, sizes="equal")),
        "scatter": (held, root[::-1], partial(ag.scatter, sizes=[n] * world)),
        "shift": (n, (partial(move, by=1), partial(move, by=-1)), partial(ag.shift, sizes="equal")),
        "scan (raw: all_gather, sum)": (
            n,
            (partial(running_sum, reverse=False), partial(running_sum, reverse=True)),
            ag.scan,
        ),
    }


def must_cross(name: str, n: int, hosts: int, local: int) -> float:
    """Elements that enter or leave the busiest host, in one direction, forward and backward."""
    world = hosts * local
    rows = [n // 8] * (world - 1) + [n]
    away, own = sum(rows[:-local]), sum(rows[-local:])  # seen from the host of the longest
    unit = n // (world + 7)
    entering = (world - local) * local * 8 * unit / local  # for the rank that gets most
    one = {
        "all_gather": 2 * n * (world - local),
        "reduce_scatter": 2 * n * (world - local),
        "all_reduce": 4 * n * (hosts - 1) / hosts,
        "all_to_all": 2 * n * local * (world - local) / world,
        "gather": 2 * n * (world - local),
        "scatter": 2 * n * (world - local),
    }
    if "padded" in name:
        return 2 * max(away, own)
    if name == "all_to_all, ragged":
        return 2 * (entering + (world - local) * (local - 1) * unit)
    return one.get(name, 2 * n)


def both_ways(call: Any, x: Tensor, g: Tensor | None) -> Tensor:
    """The result's gradient is the result itself, unless it is given."""
    y: Tensor = call(x)
    (gradient,) = torch.autograd.grad(y, x, y.detach() if g is None else g)
    return gradient


def in_autograd(forward: Callable[[Tensor], Tensor], adjoint: Callable[[Tensor], Tensor]) -> Any:
    """A pair of raw calls, made differentiable in the shortest way."""

    class Raw(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
            return forward(x)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:  # noqa: ARG004
            return adjoint(g)

    return Raw.apply


def measure(name: str, n: int, repeats: int) -> tuple[bool, list[float], list[float], list[float]]:
    """On every rank: whether the gradients agree, seconds of the raw calls, of these in autograd and of ours."""
    warnings.simplefilter("ignore")
    length, (forward, adjoint), ours = cases(n)[name]
    x = torch.full((length,), float(dist.get_rank() + 1), requires_grad=True)
    raw: Callable[[], Tensor] = lambda: adjoint(forward(x.detach()))  # noqa: E731
    wrapped = in_autograd(forward, adjoint)
    floor: Callable[[], Tensor] = lambda: both_ways(wrapped, x, None)  # noqa: E731
    mine: Callable[[], Tensor] = lambda: both_ways(ours, x, None)  # noqa: E731
    agree = torch.equal(raw(), mine())
    runs: list[tuple[Callable[[], Tensor], list[float]]] = [(raw, []), (floor, []), (mine, [])]
    times = [seconds for _, seconds in runs]
    order = random.Random(0)  # noqa: S311 - the same on every rank
    for _ in range(repeats):
        order.shuffle(runs)
        for call, seconds in runs:
            dist.barrier()
            began = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - began)
    return agree, times[0], times[1], times[2]


def rate_of(link: str) -> float:
    """Bytes a second."""
    unit = next(unit for unit in UNITS if link.endswith(unit))
    return float(link.removesuffix(unit)) * UNITS[unit]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--hosts", type=int, default=2)
    options.add_argument("--ranks-per-host", type=int, default=4)
    options.add_argument("--link", default=None)
    options.add_argument("--sizes", default="256KiB,1MiB")
    options.add_argument("--only", default=None)
    options.add_argument("--repeats", type=int, default=5)
    given = options.parse_args()
    print(
        "| forward + backward, ms | piece | link | raw | in autograd | allgrad | of raw |\n"
        "|---|---|---|---|---|---|---|"
    )
    with Hosts(given.hosts, ranks_per_host=given.ranks_per_host, rate=given.link) as hosts:
        names, world = hosts.run(list_cases)[0], given.hosts * given.ranks_per_host
        for name in [
            n
            for n in names
            if given.only is None or n.split()[0].strip(",") in given.only.split(",")
        ]:
            for size in map(parse_bytes, given.sizes.split(",")):
                elements = size // 4 // world * world
                found = hosts.run(measure, name, elements, given.repeats, timeout=300)
                assert all(agree for agree, *_ in found), f"{name}: gradients differ"
                raw, floor, ours = (
                    1e3 * statistics.median(max(t) for t in zip(*times, strict=True))
                    for times in zip(*(times for _, *times in found), strict=True)
                )
                must = 4 * must_cross(name, elements, given.hosts, given.ranks_per_host)
                link = f"{1e3 * must / rate_of(given.link):.1f}" if given.link else ""
                row = (
                    name,
                    format_bytes(size),
                    link,
                    f"{raw:.1f}",
                    f"{floor:.1f}",
                    f"{ours:.1f}",
                    f"{ours / raw:.2f}",
                )
                print(f"| {' | '.join(row)} |", flush=True)


def list_cases() -> list[str]:
    return list(cases(1024))


if __name__ == "__main__":
    main()
