"""Which calls a picture shows when there are too many for all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from allgrad.report.matching import NEVER
from allgrad.report.waits import look

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from allgrad.report.load import RankFile, Recording
    from allgrad.report.matching import Matched

__all__ = ["Shown", "Slices", "sample", "slices"]

_RUN = 64  # neighbours are shown together, so that one sees what follows what


class Shown(NamedTuple):
    """The calls that are shown of each group, and how many events that is of how many."""

    columns: list[tuple[Matched, NDArray[np.int64]]]
    events: int
    total: int


class Slices(NamedTuple):
    """Some calls of one rank on one group, as arrays; ``cause`` is the rank that was waited for."""

    file: RankFile
    group: Matched
    number: NDArray[np.int64]
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    waits: NDArray[np.int64]
    cause: NDArray[np.int64]
    begun: NDArray[np.int64]  # when the rank that was waited for started
    kind: NDArray[np.int64]
    sent: NDArray[np.int64]
    received: NDArray[np.int64]
    failed: NDArray[np.int64]
    thread: NDArray[np.int64]


def sample(matched: list[Matched], most: int) -> Shown:
    """At most so many events: the last calls, the longest ones, and runs of others at even distances."""
    total = sum(int((group.index >= 0).sum()) for group in matched)
    shown = []
    for group in matched:
        ranks, calls = group.index.shape
        share = int(most * (calls * ranks / max(1, total)) / ranks)
        columns = np.arange(calls) if total <= most else _choose(group, max(1, share))
        shown.append((group, columns))
    events = sum(int((group.index[:, columns] >= 0).sum()) for group, columns in shown)
    return Shown(shown, events, total)


def _choose(group: Matched, budget: int) -> NDArray[np.int64]:
    calls = group.index.shape[1]
    tail, longest = budget // 5, budget // 10
    runs = max(1, (budget - tail - longest) // _RUN)
    starts = np.linspace(0, max(0, calls - _RUN), runs).astype(np.int64)
    picked = np.zeros(calls, bool)
    picked[(starts[:, None] + np.arange(_RUN)).clip(0, calls - 1).ravel()] = True
    picked[max(0, calls - tail) :] = True
    if longest:
        took = _longest(group)
        picked[np.argpartition(took, -longest)[-longest:]] = True
    return np.flatnonzero(picked)


def _longest(group: Matched) -> NDArray[np.int64]:
    """The time of each call on the rank that was in it longest; unfinished ones come first."""
    out = np.empty(group.index.shape[1], np.int64)
    for columns in group.columns():
        start, end = group.values("start", columns, 0), group.values("end", columns, 0)
        took = np.where((start > 0) & (end == 0), NEVER, end - start)
        out[columns] = took.max(0)
    return out


def slices(recording: Recording, shown: Shown) -> Iterator[Slices]:
    """What is shown, rank by rank."""
    for group, columns in shown.columns:
        calls = look(recording, group, columns)
        begun = np.take_along_axis(calls.start, calls.cause[None], 0)[0]
        cause = np.array([file.rank for file in group.files])[calls.cause]
        failed, thread = group.values("failed", columns, 0), group.values("thread", columns, 0)
        for row, file in enumerate(group.files):
            here = calls.present[row]
            yield Slices(
                file,
                group,
                group.first + columns[here],
                calls.start[row, here],
                calls.end[row, here],
                calls.waits[row, here],
                cause[here],
                begun[here],
                calls.kind[row, here],
                calls.sent[row, here],
                calls.received[row, here],
                failed[row, here],
                thread[row, here],
            )
