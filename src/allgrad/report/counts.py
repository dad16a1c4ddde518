"""Sums over matched calls: waits by rank, bytes and time by line, the slowest calls, mismatches."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import numpy as np

from allgrad.report.model import Line, Mismatch, RankSummary, SlowCall
from allgrad.report.units import short_site
from allgrad.report.waits import look

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from allgrad.report.load import Kind, Recording
    from allgrad.report.matching import Matched
    from allgrad.report.waits import Calls

__all__ = ["Counts"]

_SLOWEST = 10
_LATE = 100_000  # ns: less is noise
_FEW, _OFTEN, _MORE = 10, 0.25, 1.5


class Counts:
    """Sums over calls, a chunk at a time."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.by_rank = {
            one.rank: RankSummary(one.rank, one.header["host"], len(one.events))
            for one in recording.ranks
        }
        self.lateness: dict[int, list[NDArray[np.int64]]] = defaultdict(list)
        self.line_of_kind, self._lines = _lines(recording.kinds)
        # The piece of a rank is what it gives, or of a reduce_scatter what it gets.
        self.gets_piece = np.array([k.operation == "reduce_scatter" for k in recording.kinds])
        self.pieces: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        self.groups_of_line: dict[int, set[tuple[int, ...]]] = defaultdict(set)
        self.events: dict[int, Counter[int]] = defaultdict(Counter)  # of each line by rank
        self.slow: list[tuple[int, int, Matched]] = []
        self.mismatches: list[Mismatch] = []
        self.agreed, self.same_bytes = _agreed(recording.kinds)

    def add(self, group: Matched, columns: slice) -> None:
        calls = look(self.recording, group, columns)
        self._add_ranks(group, calls)
        self._add_lines(group, calls)
        longest = calls.took.max(0)
        top = np.argsort(longest)[-_SLOWEST:]
        self.slow += [(int(longest[at]), columns.start + int(at), group) for at in top]
        self.slow = sorted(self.slow, key=lambda one: -one[0])[:_SLOWEST]
        if all(one.group != group.group.title for one in self.mismatches):
            # What follows the first mismatch is out of step.
            self._add_mismatch(group, columns.start, calls)

    def _add_ranks(self, group: Matched, calls: Calls) -> None:
        complete = calls.present.all(0) & (len(group.files) == len(group.group.members))
        others, lateness, last = calls.waits.sum(0), _lateness(calls.start), calls.start.argmax(0)
        for row, file in enumerate(group.files):
            one = self.by_rank[file.rank]
            one.in_calls += int(calls.took[row].sum())
            one.waiting += int(calls.waits[row].sum())
            one.caused += int(others[calls.cause == row].sum())
            one.matched += int(complete.sum())
            here = complete & (last == row)
            one.last += int(here.sum())
            late = lateness[here]
            late = late[late > max(_LATE, 2 * self.recording.precision)]
            one.late += len(late)
            self.lateness[file.rank].append(late)

    def _add_lines(self, group: Matched, calls: Calls) -> None:
        for row, file in enumerate(group.files):
            here = calls.present[row]
            kind, sent = calls.kind[row, here], calls.sent[row, here]
            line = self.line_of_kind[kind]
            piece = np.where(self.gets_piece[kind], calls.received[row, here], sent)
            took, waits = calls.took[row, here], calls.waits[row, here]
            sums = [
                np.bincount(line, weights=values, minlength=len(self._lines))
                for values in (sent, took, waits, piece)
            ]
            counts = np.bincount(line, minlength=len(self._lines))
            for number in np.unique(line):
                one = self._lines[number]
                self.groups_of_line[int(number)].add(group.group.members)
                one.nbytes += int(sums[0][number])
                one.in_calls += int(sums[1][number])
                one.waiting += int(sums[2][number])
                self.pieces[int(number)][file.rank] += int(sums[3][number])
                self.events[int(number)][file.rank] += int(counts[number])
            for number, count in enumerate(np.bincount(kind)):
                if count:
                    used = self._lines[self.line_of_kind[number]].algorithms
                    name = self.recording.kinds[number].algorithm
                    used[name] = used.get(name, 0) + int(count)
                    self._lines[self.line_of_kind[number]].on_host &= self.recording.kinds[
                        number
                    ].host

    def _add_mismatch(self, group: Matched, first: int, calls: Calls) -> None:
        agreed = np.where(calls.present, self.agreed[calls.kind], -1)
        nbytes = np.where(calls.present & self.same_bytes[calls.kind], calls.sent, -1)
        differs = ((agreed != agreed.max(0)) & calls.present).any(0)
        differs |= ((nbytes != nbytes.max(0)) & (nbytes >= 0)).any(0)
        if not differs.any():
            return
        at = int(np.argmax(differs))
        rows = [row for row in range(len(group.files)) if calls.present[row, at]]
        did = {row: (int(agreed[row, at]), int(nbytes[row, at])) for row in rows}
        usual = max(did.values(), key=list(did.values()).count)
        texts, short = {}, {}
        for row in rows:
            kind = self.recording.kinds[calls.kind[row, at]]
            amount = f"{calls.sent[row, at]} bytes of {kind.dtype}"
            root = f", root {kind.root}" if kind.root >= 0 else ""
            rank = group.files[row].rank
            texts[rank] = f"{kind.title}: {amount}{root}, {kind.site}"
            short[rank] = f"{kind.title} of {amount}{root} at {short_site(kind.site)}"
        self.mismatches.append(
            Mismatch(
                group.group.title,
                group.first + first + at,
                texts,
                short,
                [group.files[row].rank for row in rows if did[row] != usual],
                int(calls.start[rows, at].min()),
            )
        )

    def ranks(self) -> list[RankSummary]:
        for rank, found in self.lateness.items():
            lateness = np.concatenate(found)
            self.by_rank[rank].lateness = int(lateness.mean()) if len(lateness) else 0
        fair = sum(one.caused for one in self.by_rank.values()) / max(1, len(self.by_rank))
        for one in self.by_rank.values():
            often = one.matched >= _FEW and one.late >= _OFTEN * one.matched
            one.slow = often and one.caused > _MORE * fair
        return [self.by_rank[rank] for rank in sorted(self.by_rank)]

    def lines(self) -> list[Line]:
        """Lines with calls, the longest in calls first."""
        for number, line in enumerate(self._lines):
            sums = self.pieces[number]
            if sums:
                events = self.events[number]
                line.moving = (line.in_calls - line.waiting) // events.total()
                groups = self.groups_of_line[number]
                line.members = next(iter(groups)) if len(groups) == 1 else ()
                line.calls = max(1, round(events.total() / len(sums)))
                # By the calls of each rank: it may be in several of the groups of a line.
                pieces = {rank: total / events[rank] for rank, total in sorted(sums.items())}
                line.sizes = {rank: int(piece) for rank, piece in pieces.items()}
                mean = sum(pieces.values()) / len(pieces)
                line.skew = max(pieces.values()) / mean if mean else 1.0
        return sorted((line for line in self._lines if line.calls), key=lambda line: -line.in_calls)

    def slowest(self) -> list[SlowCall]:
        return [self._slow_call(group, at) for took, at, group in self.slow if took]

    def _slow_call(self, group: Matched, at: int) -> SlowCall:
        calls = look(self.recording, group, slice(at, at + 1))
        kind = self.recording.kinds[int(calls.kind.max())]
        pieces = calls.received if kind.operation == "reduce_scatter" else calls.sent
        ranks = [file.rank for file in group.files]
        return SlowCall(
            group.group.title,
            group.first + at,
            kind,
            int(calls.start.min()),
            int(calls.took.max()),
            ranks[int(calls.cause[0])],
            int(calls.waits.max()),
            dict(zip(ranks, pieces[:, 0].tolist(), strict=True)),
        )


def _lateness(start: NDArray[np.int64]) -> NDArray[np.int64]:
    """How much later the last rank started than the others, whose middle counts."""
    if len(start) == 1:
        return np.zeros(start.shape[1], np.int64)
    ordered = np.sort(start, 0)
    late: NDArray[np.int64] = ordered[-1] - ordered[(len(start) - 1) // 2]
    return late


def _lines(kinds: list[Kind]) -> tuple[NDArray[np.int64], list[Line]]:
    """The line of each kind, and all lines."""
    keys: dict[tuple[str, str, str, str, bool], int] = {}
    numbers = [
        keys.setdefault((k.name, k.operation, k.site, k.dtype, k.backward), len(keys))
        for k in kinds
    ]
    return np.array(numbers), [Line(*key) for key in keys]


def _agreed(kinds: list[Kind]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """For each kind a number of what all ranks must do alike, and whether their bytes are alike too."""
    keys: dict[tuple[object, ...], int] = {}
    numbers = [
        keys.setdefault((k.name, k.operation, k.dtype, k.root, k.backward), len(keys))
        for k in kinds
    ]
    differ = {"all_gather", "all_to_all"}
    return np.array(numbers), np.array([k.operation not in differ for k in kinds])
