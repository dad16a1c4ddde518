"""One interleaved run over the cases: medians, spread, ratios, and memory in fresh processes.

A sample is the slowest rank's time after a barrier. The ways of a case take turns, in an order drawn
anew for each round: whatever else the machine does falls on all alike, and so does what the way
before leaves behind.
"""

from __future__ import annotations

import os
import platform
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from allgrad.cli.bench.baselines import base_of
from allgrad.cli.bench.ranks import Timed, Weighed, measure, weigh
from allgrad.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from allgrad.cli.bench.cases import Case

__all__ = ["Measured", "Spread", "Summary", "machine", "run", "weighable"]

_LIMIT = 1800.0  # seconds for one case
# Bytes up to which a sample is many calls: it must last longer than what the machine does meanwhile.
_TINY, _SMALL = 64, 256 * 1024


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds: the median of the samples, and where the middle half of them lies."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, low, high)


@dataclass(slots=True)
class Summary:
    """One way of one case. ``wrong`` is empty, or says what was: values, or the gradient."""

    wrong: str
    forward: Spread
    both: Spread
    memory: Weighed | None = None


@dataclass(slots=True)
class Measured:
    """One case, all its ways, and which of them the others are compared with."""

    case: Case
    base: str
    ways: dict[str, Summary]

    def ratio(self, name: str, part: str) -> float:
        """How long a way takes, with the base as 1."""
        ours: Spread = getattr(self.ways[name], part)
        theirs: Spread = getattr(self.ways[self.base], part)
        return ours.median / theirs.median

    def plain(self) -> dict[str, Any]:
        """Plain numbers, for JSON."""
        about = {"title": self.case.title, "rows": self.case.rows, "base": self.base}
        return asdict(self.case) | about | {"ways": {k: asdict(v) for k, v in self.ways.items()}}


def run(
    cases: Sequence[Case],
    repeats: int | None,
    *,
    memory: bool,
    tell: Callable[[Case, str], None] = lambda *_: None,
) -> Iterator[Measured]:
    """Measure the cases, one after another; ``tell`` hears what comes next."""
    heaviest = max((case.nbytes for case in cases), default=0)
    for case in cases:
        tell(case, "time")
        found = _timed(case, repeats)
        if memory and case.nbytes == heaviest and weighable():
            for name, summary in found.ways.items():
                tell(case, f"memory of {name}")
                summary.memory = _weighed(case, name)
        yield found


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "backend": "gloo",
        "allocator": {k: v for k, v in os.environ.items() if k.startswith("MALLOC_")},
    }


def weighable() -> bool:
    """Tell whether the system says how much memory a process has used."""
    return Path("/proc/self/clear_refs").exists()


def _timed(case: Case, repeats: int | None) -> Measured:
    rounds = _rounds(case) if repeats is None else repeats
    calls = 100 if case.nbytes <= _TINY else 10 if case.nbytes * case.tensors <= _SMALL else 1
    by_rank = run_ranks(measure, case.world, case, rounds, calls, timeout=_LIMIT)
    ways = {name: _slowest([times[name] for times in by_rank]) for name in by_rank[0]}
    return Measured(case, base_of(case), ways)


def _rounds(case: Case) -> int:
    """More samples where one is quick, and where noise is most of it."""
    nbytes = case.nbytes * case.tensors
    return 41 if nbytes <= 4096 else 31 if nbytes <= 2**23 else 11


def _slowest(ranks: Sequence[Timed]) -> Summary:
    """The slowest rank's time of each sample; wrong where any rank is."""
    return Summary(
        next((rank.wrong for rank in ranks if rank.wrong), ""),
        Spread.of([max(times) for times in zip(*(rank.forward for rank in ranks), strict=True)]),
        Spread.of([max(times) for times in zip(*(rank.both for rank in ranks), strict=True)]),
    )


def _weighed(case: Case, name: str) -> Weighed:
    """The rank with the highest peak. A new process starts ranks that have done nothing before."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
        ranks = fresh.submit(run_ranks, weigh, case.world, case, name, timeout=_LIMIT).result()
    return max(ranks, key=lambda weighed: weighed.both)
