"""One interleaved run over the cases: medians, spread, ratios, and memory in new processes.

A sample is the time of the slowest rank after a barrier. The implementations of a case run one
after another, in a new random order for each round, so that other load on the machine, and effects
of the previous implementation, fall on all of them equally.
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

from allgrad.cli.bench.baselines import baseline_of
from allgrad.cli.bench.measure import PeakMemory, Times, measure_memory, measure_time
from allgrad.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from allgrad.cli.bench.cases import Case
    from allgrad.testing import Hosts

__all__ = ["Measured", "Spread", "Summary", "can_measure_memory", "machine", "run"]

_LIMIT = 1800.0  # seconds for one case
# Up to these bytes a sample is many calls, so that it lasts longer than the noise of the machine.
_TINY, _SMALL = 64, 256 * 1024


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds: the median and the quartiles of the samples."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, low, high)


@dataclass(slots=True)
class Summary:
    """One implementation of one case. ``wrong`` is empty, "values" or "gradient"."""

    wrong: str
    forward: Spread
    both: Spread
    memory: PeakMemory | None = None


@dataclass(slots=True)
class Measured:
    """One case: the results of all implementations, and the name of the baseline."""

    case: Case
    base: str
    implementations: dict[str, Summary]

    def ratio(self, name: str, part: str) -> float:
        """The time of an implementation, as a multiple of the time of the baseline."""
        ours: Spread = getattr(self.implementations[name], part)
        theirs: Spread = getattr(self.implementations[self.base], part)
        return ours.median / theirs.median

    def plain(self) -> dict[str, Any]:
        """Numbers and strings, for JSON."""
        about = {"title": self.case.title, "rows": self.case.rows, "base": self.base}
        return (
            asdict(self.case)
            | about
            | {"implementations": {k: asdict(v) for k, v in self.implementations.items()}}
        )


def run(
    cases: Sequence[Case],
    repeats: int | None,
    *,
    memory: bool,
    tell: Callable[[Case, str], None] = lambda *_: None,
    hosts: Hosts | None = None,
    peers: Sequence[str] | None = None,
    every_algorithm: bool = False,
) -> Iterator[Measured]:
    """Measure the cases, one after another; ``tell`` is called before each step.

    With ``hosts``, the ranks of every case run on them. ``peers`` and ``every_algorithm`` are those
    of ``implementations_of``.
    """
    largest = max((case.nbytes for case in cases), default=0)
    for case in cases:
        tell(case, "time")
        found = _timed(case, repeats, hosts, peers, every_algorithm)
        if memory and case.nbytes == largest and can_measure_memory():
            for name, summary in found.implementations.items():
                tell(case, f"memory of {name}")
                summary.memory = _peak_memory(case, name)
        yield found


def machine(hosts: Hosts | None = None) -> dict[str, Any]:
    """The machine and the versions, on which the results depend."""
    layout = {} if hosts is None else {"hosts": len(hosts.names), "link": hosts.rate or "unlimited"}
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "backend": "gloo",
        "allocator": {k: v for k, v in os.environ.items() if k.startswith("MALLOC_")},
        **layout,
    }


def can_measure_memory() -> bool:
    """Tell whether the system reports the peak memory of a process."""
    return Path("/proc/self/clear_refs").exists()


def _timed(
    case: Case,
    repeats: int | None,
    hosts: Hosts | None,
    *which: Any,
) -> Measured:
    rounds = _rounds(case) if repeats is None else repeats
    calls = 100 if case.nbytes <= _TINY else 10 if case.nbytes * case.tensors <= _SMALL else 1
    if hosts is None:
        by_rank = run_ranks(measure_time, case.world, case, rounds, calls, *which, timeout=_LIMIT)
    else:
        by_rank = hosts.run(measure_time, case, rounds, calls, *which, timeout=_LIMIT)
    results = {name: _slowest([times[name] for times in by_rank]) for name in by_rank[0]}
    return Measured(case, baseline_of(case), results)


def _rounds(case: Case) -> int:
    """More samples for small sizes: they are quick and noisy."""
    nbytes = case.nbytes * case.tensors
    return 41 if nbytes <= 4096 else 31 if nbytes <= 2**23 else 11


def _slowest(ranks: Sequence[Times]) -> Summary:
    """The slowest rank of each sample; wrong if any rank is wrong."""
    return Summary(
        next((rank.wrong for rank in ranks if rank.wrong), ""),
        Spread.of([max(times) for times in zip(*(rank.forward for rank in ranks), strict=True)]),
        Spread.of([max(times) for times in zip(*(rank.both for rank in ranks), strict=True)]),
    )


def _peak_memory(case: Case, name: str) -> PeakMemory:
    """The rank with the highest peak. A new process starts new ranks."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
        ranks = fresh.submit(
            run_ranks, measure_memory, case.world, case, name, timeout=_LIMIT
        ).result()
    return max(ranks, key=lambda peak: peak.both)
