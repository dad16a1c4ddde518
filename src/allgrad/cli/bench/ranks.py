"""What one rank does for a measurement: check every way, then time or weigh it."""

from __future__ import annotations

import random
import time
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from allgrad._wire.world import rank_of
from allgrad.cli.bench.baselines import barrier, ways_of
from allgrad.cli.bench.cases import brought, wanted

if TYPE_CHECKING:
    from torch import Tensor

    from allgrad.cli.bench.baselines import Way
    from allgrad.cli.bench.cases import Case

__all__ = ["Timed", "Weighed", "measure", "weigh"]


@dataclass(slots=True)
class Timed:
    """One way on one rank: what was wrong with it, if anything, and seconds by sample."""

    wrong: str
    forward: list[float] = field(default_factory=list)
    both: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Weighed:
    """Bytes of memory at the peak, beyond what was held before; the result's own included."""

    result: int
    forward: int
    both: int


def measure(case: Case, repeats: int, calls: int) -> dict[str, Timed]:
    """Time every way, one after another, in an order drawn anew for each round.

    ``calls`` calls make one sample, and go backward together, as in a training step.
    """
    warnings.simplefilter("ignore", FutureWarning)
    rank = rank_of()
    ways = ways_of(case, rank)
    given, gs = _ready(case, rank, calls)
    want = wanted(case, rank)
    times = {name: Timed(_wrong(way, given[0], gs, want)) for name, way in ways.items()}
    del want
    names = list(ways)
    order = random.Random(0)  # noqa: S311 - the same on every rank
    for _ in range(repeats):
        order.shuffle(names)
        for name in names:
            for back, samples in ((False, times[name].forward), (True, times[name].both)):
                barrier()
                began = time.perf_counter()
                _run(ways[name], given, gs, back=back)
                samples.append((time.perf_counter() - began) / calls)
    return times


def weigh(case: Case, name: str) -> Weighed:
    """Find the peak memory of one way; the process has done nothing else before."""
    warnings.simplefilter("ignore", FutureWarning)
    rank = rank_of()
    small = replace(case, nbytes=16 * 1024)  # what is loaded or connected on first use
    way = ways_of(small, rank)[name]
    _run(way, *_ready(small, rank))
    way = ways_of(case, rank)[name]
    given, gs = _ready(case, rank)
    barrier()
    before = _reset_peak()
    with torch.set_grad_enabled(way.backward is None):
        ys = way.forward(given[0])
        forward = _peak() - before
        _back(way, given, [ys], gs)
    return Weighed(sum(y.nbytes for y in ys), forward, _peak() - before)


def _ready(case: Case, rank: int, calls: int = 1) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Inputs for each call, its own: gradients of the same one would have to be added up."""
    xs, gs = brought(case, rank)
    return [[x.clone().requires_grad_() for x in xs] for _ in range(calls)], gs


def _back(
    way: Way, given: list[list[Tensor]], made: list[list[Tensor]], gs: list[Tensor]
) -> list[Tensor]:
    """Go backward through calls; the gradients of all of them."""
    if way.backward is None:
        xs, ys = [x for xs in given for x in xs], [y for ys in made for y in ys]
        return list(torch.autograd.grad(ys, xs, gs * len(made)))
    return [g for _ in made for g in way.backward(gs)]


def _run(way: Way, given: list[list[Tensor]], gs: list[Tensor], *, back: bool = True) -> None:
    with torch.set_grad_enabled(way.backward is None):
        if not back:
            for xs in given:
                way.forward(xs)
            return
        _back(way, given, [way.forward(xs) for xs in given], gs)


def _wrong(
    way: Way, xs: list[Tensor], gs: list[Tensor], want: tuple[list[Tensor], list[Tensor]]
) -> str:
    with torch.set_grad_enabled(way.backward is None):
        ys = way.forward(xs)
        gradients = _back(way, [xs], [ys], gs)
    if not all(torch.equal(y, w) for y, w in zip(ys, want[0], strict=True)):
        return "values"
    if not all(torch.equal(g, w) for g, w in zip(gradients, want[1], strict=True)):
        return "gradient"
    return ""


def _reset_peak() -> int:
    """Begin a new peak at what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])
