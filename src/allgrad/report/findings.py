"""A recording becomes findings: who waits for whom, where time and bytes go, what hangs."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from allgrad._wire.recording import boot
from allgrad.report.clocks import align
from allgrad.report.counts import Counts
from allgrad.report.load import load
from allgrad.report.matching import match
from allgrad.report.model import Findings, LastCall
from allgrad.report.units import seconds, short_site

if TYPE_CHECKING:
    from pathlib import Path

    from allgrad.report.load import RankFile, Recording

__all__ = ["find"]

_SKEWED = 1.5
_MUCH = 0.05  # of the time in calls: less is not worth a note
_NOTES = 3
_HANGS = 10**9  # ns in one call, while the job still runs


def find(path: Path) -> Findings:
    """Load, align and look through a recording."""
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
    last_calls = [_last_call(recording, one) for one in recording.ranks if len(one.events)]
    alive = [one for one in recording.ranks if _state(one) == "running"]
    if alive and alive[0].header["boot"] == recording.ranks[0].header["boot"]:
        ended = max(ended, time.monotonic_ns())
    hangs = any(
        not one.ended and (one.state == "gone" or ended - one.began > _HANGS) for one in last_calls
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
    found.headlines = _headlines(found)
    return found


def _last_call(recording: Recording, file: RankFile) -> LastCall:
    events = file.events
    unfinished = np.flatnonzero(events.end == 0)
    at = int(unfinished[-1]) if len(unfinished) else len(events) - 1
    start = int(events.start[at])
    return LastCall(
        file.rank,
        recording.groups[events.group[at]].title,
        int(events.number[at]),
        recording.kinds[events.kind[at]],
        start,
        int(events.end[at]),
        file.errors.get(start, "").partition("\n")[0],
        _state(file),
    )


def _state(file: RankFile) -> str:
    if file.closed:
        return "closed"
    if file.header["boot"] != boot():
        return "on another host"
    try:
        os.kill(file.header["process"], 0)
    except ProcessLookupError:
        return "gone"
    except PermissionError:
        pass
    return "running"


def _headlines(found: Findings) -> list[tuple[str, str]]:
    """What one has to know, the worst first: ("bad" or "note", a sentence)."""
    bad = _hang(found) if found.hangs else []
    for one in found.mismatches:
        odd = _ranks(one.odd, "does", "do")
        bad.append(f"Call {one.number} of {one.group} differs: {odd} another thing.")
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


def _hang(found: Findings) -> list[str]:
    """Who is in which call, and who has not come to it."""
    inside: dict[tuple[str, int], list[LastCall]] = defaultdict(list)
    for one in found.last_calls:
        if not one.ended:
            inside[one.group, one.number].append(one)
    sentences = []
    for (title, number), calls in inside.items():
        kind, since = calls[0].kind, seconds(found.ended - min(one.began for one in calls))
        runs = any(one.state == "running" for one in calls)
        text = (
            f"{_ranks([one.rank for one in calls], 'is', 'are')} in call {number} of {title}, "
            f"{kind.title} at {short_site(kind.site)}, "
            f"{f'for {since}' if runs else 'which did not end'}."
        )
        group = next(one for one in found.recording.groups if one.title == title)
        came = {file.rank for one in found.matched if one.group == group for file in one.at(number)}
        absent = [rank for rank in group.members if rank not in came]
        sentences.append(text + (f" {_ranks(absent, 'has', 'have')} not come." if absent else ""))
    return sentences


def _ranks(ranks: list[int], one: str, many: str) -> str:
    words = ", ".join(map(str, ranks))
    return f"Rank {words} {one}" if len(ranks) == 1 else f"Ranks {words} {many}"
