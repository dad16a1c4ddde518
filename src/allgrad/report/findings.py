"""A recording becomes findings: who waits for whom, where time and bytes go, what hangs."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import TYPE_CHECKING

from allgrad.report.clocks import align
from allgrad.report.counts import Counts
from allgrad.report.ending import GONE, RUNNING, endings, last_call, state
from allgrad.report.load import load
from allgrad.report.matching import match
from allgrad.report.model import Findings
from allgrad.report.predicted import predict_lines
from allgrad.report.units import ranks_text, seconds, short_site

if TYPE_CHECKING:
    from pathlib import Path

    from allgrad._wire.link_model import Links
    from allgrad.report.model import Mismatch

__all__ = ["find"]

_SKEWED = 1.5
_MUCH = 0.05  # of the time in calls: less is not worth a note
_NOTES = 3
_HANGS = 10**9  # ns in one call, while the job still runs


def find(path: Path, links: Links | None = None) -> Findings:
    """Load, align and look through a recording; ``links`` are for what ``allgrad plan`` says."""
    recording = load(path)
    align(recording)
    matched = match(recording)
    seen = [one.events for one in recording.ranks if len(one.events)]
    began = min((int(e.start[0]) for e in seen), default=0)
    ended = max((max(int(e.start[-1]), int(e.end.max())) for e in seen), default=0)
    count = Counts(recording)
    for group in matched:
        for columns in group.columns():
            count.add(group, columns)
    last_calls = [last_call(recording, one) for one in recording.ranks if len(one.events)]
    alive = [one for one in recording.ranks if state(one) == RUNNING]
    if alive and alive[0].header["boot"] == recording.ranks[0].header["boot"]:
        ended = max(ended, time.monotonic_ns())
    hangs = any(
        not one.ended and (one.state == GONE or ended - one.began > _HANGS) for one in last_calls
    )
    found = Findings(
        recording,
        matched,
        began,
        ended,
        count.ranks(),
        count.lines(),
        count.slowest(),
        count.mismatches,
        last_calls,
        hangs,
    )
    predict_lines(found.lines, recording, links)
    found.headlines = _headlines(found)
    return found


def _did(mismatch: Mismatch) -> str:
    """What the ranks did, those that did the same together."""
    same: dict[str, list[int]] = defaultdict(list)
    for rank, short in mismatch.short.items():
        same[short].append(rank)
    return "; ".join(f"{ranks_text(ranks)}: {words}" for words, ranks in same.items())


def _headlines(found: Findings) -> list[tuple[str, str]]:
    """What one has to know, the worst first: ("bad" or "note", a sentence)."""
    bad = endings(found)
    bad += [f"Call {one.number} of {one.group} differs: {_did(one)}." for one in found.mismatches]
    for rank in sorted(found.ranks, key=lambda one: -one.caused):
        if rank.slow:
            share = f"{rank.late / rank.matched:.0%} of calls"
            late = f"Rank {rank.rank} is late in {share}, by {seconds(rank.lateness)}"
            bad.append(f"{late}; the others waited {seconds(rank.caused)} for it.")
    notes: list[str] = []
    all_of_them = sum(line.in_calls for line in found.lines)
    for line in found.lines:
        if line.skew >= _SKEWED and line.in_calls >= _MUCH * all_of_them:
            largest = max(line.sizes, key=lambda rank: line.sizes[rank])
            where = f"{line.name} at {short_site(line.site)}"
            notes.append(f"{where}: the piece of rank {largest} is {line.skew:.1f} times the mean.")
    notes = list(dict.fromkeys(notes))[:_NOTES] + found.recording.notes
    return [("bad", sentence) for sentence in bad] + [("note", sentence) for sentence in notes]
