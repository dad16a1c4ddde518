"""``allgrad bench --calibrate FILE``: the table of links that ``allgrad plan`` reads.

Calls are measured by every algorithm, at two sizes, with 2 and 4 ranks; the prices that explain them
best are the table. With ``--hosts``, a message between two of them gives the link's own.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from allgrad._wire import algorithms
from allgrad._wire.link_model import Links, fit, host_cores, situation
from allgrad.cli.bench.baselines import barrier
from allgrad.collectives.all_gather import all_gather, reduce_scatter
from allgrad.collectives.all_reduce import all_reduce
from allgrad.collectives.all_to_all import all_to_all
from allgrad.collectives.broadcast import broadcast, reduce
from allgrad.testing import Hosts, run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

__all__ = ["Cell", "Timed", "calibrate", "cells", "measure", "time_cells"]

WORLDS, SIZES = (2, 4), (16 << 10, 1 << 20)
_LIMIT = 600.0


class Cell(NamedTuple):
    """An operation by one algorithm; every rank passes so many bytes."""

    operation: str
    algorithm: str
    nbytes: int


class Timed(NamedTuple):
    """A cell in a world: seconds, median and quartiles of the slowest rank."""

    ranks: int
    cell: Cell
    median: float
    low: float
    high: float


_CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "all_reduce": all_reduce,
    "all_gather": lambda x: all_gather(x, sizes="equal"),
    "reduce_scatter": lambda x: reduce_scatter(x, sizes="equal"),
    "all_to_all": lambda x: all_to_all(x, send_sizes="equal"),
    "broadcast": broadcast,
    "reduce": reduce,
}


_BETWEEN_HOSTS = frozenset({"across_hosts", "repeated"})


def cells(sizes: Sequence[int]) -> list[Cell]:
    """Every algorithm that can run on one host, at these sizes."""
    return [
        Cell(operation, entry.name, nbytes)
        for operation, entries in algorithms.TABLE.items()
        for entry in entries
        if entry.name not in _BETWEEN_HOSTS
        for nbytes in sizes
    ]


def time_cells(chosen: Sequence[Cell], rounds: int) -> list[list[float]]:
    """On one rank: seconds of each cell, in a new order each round; the first round does not count."""
    times: list[list[float]] = [[] for _ in chosen]
    numbers, order = list(range(len(chosen))), random.Random(0)  # noqa: S311 - the same on every rank
    with torch.no_grad():
        for turn in range(rounds + 1):
            order.shuffle(numbers)
            for number in numbers:
                cell = chosen[number]
                call, x = _CALLS[cell.operation], torch.ones(cell.nbytes // 4)
                calls = max(1, min(10, (1 << 20) // cell.nbytes))
                with algorithms.using(**{cell.operation: cell.algorithm}):
                    call(x)
                    barrier()
                    began = time.perf_counter()
                    for _ in range(calls):
                        call(x)
                    if turn:
                        times[number].append((time.perf_counter() - began) / calls)
    return times


def measure(world: int, chosen: Sequence[Cell], rounds: int) -> list[Timed]:
    """On ranks of this host."""
    return _slowest(world, chosen, run_ranks(time_cells, world, chosen, rounds, timeout=_LIMIT))


def _slowest(
    world: int, chosen: Sequence[Cell], by_rank: Sequence[list[list[float]]]
) -> list[Timed]:
    found = []
    for number, cell in enumerate(chosen):
        samples = [max(one) for one in zip(*(rank[number] for rank in by_rank), strict=True)]
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        found.append(Timed(world, cell, median, low, high))
    return found


def calibrate(
    about: str, rounds: int = 9, hosts: int | None = None, link: str | None = None
) -> Links:
    """The table of this machine; with ``hosts``, of links of this rate between them."""
    probes = [timed for world in WORLDS for timed in measure(world, cells(SIZES), rounds)]
    links = from_probes(probes, about)
    if hosts is None:
        return links
    small, large = (Cell("broadcast", "linear", nbytes) for nbytes in (4 << 10, 1 << 20))
    with Hosts(2, ranks_per_host=1, rate=link) as made:
        by_rank = made.run(time_cells, [small, large], rounds, timeout=_LIMIT)
    first, second = _slowest(2, [small, large], by_rank)
    moved = second.cell.nbytes - first.cell.nbytes
    return replace(
        links,
        between_latency=max(links.latency, first.median - links.overhead - links.message),
        between_bandwidth=moved / max(1e-9, second.median - first.median),
    )


def from_probes(probes: Sequence[Timed], about: str) -> Links:
    """The table that explains what was measured on one host."""
    rows = []
    for timed in probes:
        operation, name, nbytes = timed.cell
        s = situation(operation, timed.ranks, nbytes)
        (entry,) = (e for e in algorithms.TABLE[operation] if e.name == name)
        rows.append((entry.cost(s), s, timed.median))
    return fit(rows, host_cores(), about)
