"""One call on all its ranks: events of one group with one number belong together.

A ``Matched`` group has a column for each call and a row for each rank of the group, in which the
index of that rank's event stands, or -1. Columns are looked at in chunks, so that memory does not
grow with the number of calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from allgrad.report.load import Group, RankFile, Recording

__all__ = ["CHUNK", "NEVER", "Matched", "match"]

CHUNK = 1 << 16  # columns looked at together
NEVER = 1 << 62


@dataclass(slots=True)
class Matched:
    """The calls of one group."""

    number: int  # of the group in the recording
    group: Group
    files: list[RankFile]  # of those members that recorded
    first: int  # number of the call in the first column
    index: NDArray[np.int32]  # [member, call]: the event of that rank, or -1

    def columns(self) -> Iterator[slice]:
        """The columns in chunks."""
        calls = self.index.shape[1]
        return (slice(at, min(at + CHUNK, calls)) for at in range(0, calls, CHUNK))

    def at(self, number: int) -> list[RankFile]:
        """The ranks that came to a call."""
        if not 0 <= number - self.first < self.index.shape[1]:
            return []
        came = self.index[:, number - self.first] >= 0
        return [file for file, here in zip(self.files, came, strict=True) if here]

    def values(
        self, name: str, columns: slice | NDArray[np.int64], missing: int
    ) -> NDArray[np.int64]:
        """A field of the events in these columns, by member and call."""
        index = self.index[:, columns]
        out = np.full(index.shape, missing, np.int64)
        for row, file in enumerate(self.files):
            here = index[row] >= 0
            out[row, here] = getattr(file.events, name)[index[row, here]]
        return out


def match(recording: Recording) -> list[Matched]:
    """Every group with the calls that some of its ranks still have.

    Calls before the oldest one that all ranks have left are not matched: their events on other
    ranks were overwritten.
    """
    found = []
    for number, group in enumerate(recording.groups):
        files = [file for rank in group.members if (file := recording.rank(rank)) is not None]
        events = [np.flatnonzero(file.events.group == number) for file in files]
        present = [(file, where) for file, where in zip(files, events, strict=True) if len(where)]
        if not present:
            continue
        numbers = [file.events.number[where] for file, where in present]
        first = max(int(n.min()) for n in numbers)
        last = max(int(n.max()) for n in numbers)
        index = np.full((len(present), last - first + 1), -1, np.int32)
        for row, ((_, where), own) in enumerate(zip(present, numbers, strict=True)):
            kept = own >= first
            index[row, own[kept] - first] = where[kept]
        found.append(Matched(number, group, [file for file, _ in present], first, index))
    return found
