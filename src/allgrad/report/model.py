"""What is found in a recording, as data. Times are in ns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from allgrad.report.load import Kind, Recording
    from allgrad.report.matching import Matched

__all__ = ["Findings", "LastCall", "Line", "Mismatch", "RankSummary", "SlowCall"]


@dataclass(slots=True)
class RankSummary:
    """One rank's calls: times in ns."""

    rank: int
    host: str
    calls: int
    in_calls: int = 0
    waiting: int = 0  # of that, before the last rank had started
    caused: int = 0  # what the others waited for this rank
    last: int = 0  # calls that it was the last to start
    late: int = 0  # of those, late by more than noise
    matched: int = 0
    lateness: int = 0  # the mean, where it was late
    slow: bool = False  # late often, and waited for much longer than one rank of so many would be


@dataclass(slots=True)
class Line:
    """All calls of one kind from one line of the program, whatever algorithm ran them."""

    name: str
    operation: str
    site: str
    dtype: str
    backward: bool
    calls: int = 0  # of one rank, on average
    nbytes: int = 0  # that ranks gave, all together
    in_calls: int = 0
    waiting: int = 0
    algorithms: dict[str, int] = field(default_factory=dict)
    skew: float = 1.0  # largest piece of a rank by the mean, over all calls
    sizes: dict[int, int] = field(default_factory=dict)  # bytes of the piece by rank, on average
    members: tuple[int, ...] = ()  # ranks of its group; none where it ran on several
    on_host: bool = True
    moving: int = 0  # time of a call on a rank, without waiting
    planned: tuple[str, int] | None = (
        None  # algorithm of allgrad plan; its time for the one that ran
    )


@dataclass(slots=True)
class SlowCall:
    """One call on all ranks."""

    group: str
    number: int
    kind: Kind
    began: int
    took: int  # by the rank that was in it longest
    waited_for: int  # rank
    waited: int
    sizes: dict[int, int]


@dataclass(slots=True)
class Mismatch:
    """One call in which the ranks did different things."""

    group: str
    number: int
    by_rank: dict[int, str]
    short: dict[int, str]  # the same in few words
    odd: list[int]
    began: int


@dataclass(slots=True)
class LastCall:
    """What a rank did last."""

    rank: int
    group: str
    number: int
    kind: Kind
    began: int
    ended: int  # 0: it has not
    error: str
    state: str  # of the process: running, gone, closed


@dataclass(slots=True)
class Findings:
    """Everything that text and page show."""

    recording: Recording
    matched: list[Matched]
    began: int
    ended: int
    ranks: list[RankSummary]
    lines: list[Line]
    slowest: list[SlowCall]
    mismatches: list[Mismatch]
    last_calls: list[LastCall]
    hangs: bool
    headlines: list[tuple[str, str]] = field(default_factory=list)  # ("bad" | "note", sentence)
