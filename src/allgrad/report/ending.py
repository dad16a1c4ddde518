"""How a recording ends: the last call of each rank, who is stuck in which call, and who has not come."""

from __future__ import annotations

import os
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from allgrad._wire.recorder import boot
from allgrad.report.model import LastCall
from allgrad.report.units import ranks_do, seconds, short_site

if TYPE_CHECKING:
    from allgrad.report.load import RankFile, Recording
    from allgrad.report.model import Findings

__all__ = ["GONE", "RUNNING", "endings", "last_call", "state"]

RUNNING, GONE, CLOSED, ELSEWHERE = "running", "gone", "closed", "on another host"
_FIRST_LINE = 200  # characters


def last_call(recording: Recording, file: RankFile) -> LastCall:
    """What a rank did last, or has not ended."""
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
        file.errors.get(start, "raised" if events.failed[at] else ""),
        state(file),
    )


def state(file: RankFile) -> str:
    """Whether the process of a rank still runs, as far as this host can tell."""
    if file.closed:
        return CLOSED
    if file.header["boot"] != boot():
        return ELSEWHERE
    return RUNNING if _is_alive(file) else GONE


def _is_alive(file: RankFile) -> bool:
    try:
        os.kill(file.header["process"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def endings(found: Findings) -> list[str]:
    """Sentences about calls that did not end or raised, the earliest first, and who is not in them."""
    together: dict[tuple[str, int], list[LastCall]] = defaultdict(list)
    for one in found.last_calls:
        if one.error or (found.hangs and not one.ended):
            together[one.group, one.number].append(one)
    calls = sorted(together.items(), key=lambda item: min(one.began for one in item[1]))
    sentences = []
    for (title, number), inside in calls:
        group = next(one for one in found.recording.groups if one.title == title)
        came = {file.rank for one in found.matched if one.group == group for file in one.at(number)}
        absent = [rank for rank in group.members if rank not in came]
        sentences.append(" ".join([_inside(found, inside), *_absent(found, absent)]))
    return sentences


def _inside(found: Findings, inside: list[LastCall]) -> str:
    one = inside[0]
    lines = dict.fromkeys(f"{last.kind.title} at {short_site(last.kind.site)}" for last in inside)
    what = f"call {one.number} of {one.group}, {' and '.join(lines)}"
    raised = [last for last in inside if last.error]
    waiting = [last for last in inside if not last.error]
    if any(last.state == RUNNING for last in waiting):
        how = f"for {seconds(found.ended - min(last.began for last in waiting))}"
    else:
        how = "which did not end"
    still = ranks_do([last.rank for last in waiting], "is", "are")
    if not raised:
        return f"{still} in {what}, {how}."
    # That another rank raised is told by its own error.
    first = min(raised, key=lambda last: (last.error.startswith("RankRaised"), last.began))
    who = ranks_do([last.rank for last in raised], "raised", "raised")
    others = f" {still} in it, {how}." if waiting else ""
    return f"{who} in {what}: {_first_line(first.error)}{others}"


def _absent(found: Findings, ranks: list[int]) -> list[str]:
    """Why ranks have not come to a call: those of one reason together."""
    reasons: dict[str, list[int]] = defaultdict(list)
    for rank in ranks:
        reasons[_reason(found, rank)].append(rank)
    return [
        f"{ranks_do(those, 'has', 'have')} not come: {reason}." for reason, those in reasons.items()
    ]


def _reason(found: Findings, rank: int) -> str:
    file = found.recording.rank(rank)
    if file is None:
        return "no call of it is recorded"
    last = next((one for one in found.last_calls if one.rank == rank), None)
    if last is None:
        before = "no call of it is recorded"
    else:
        where = f"{last.kind.title} at {short_site(last.kind.site)}"
        if not last.ended:
            return f"it is in call {last.number} of {last.group}, {where}"
        if last.error:
            return f"it raised in call {last.number} of {last.group}"
        before = f"its last call was {where}, {seconds(found.ended - last.ended)} before the end"
    if file.ended_by:
        error, site = file.ended_by
        at = f" at {short_site(site)}" if site else ""
        return f"{_first_line(error).rstrip('.')}{at} ended it; {before}"
    process, host = file.header["process"], file.header["host"]
    if file.closed:
        return f"{before}, and then its recording ended without an error"
    here = file.header["boot"] == boot()
    if here and not _is_alive(file):
        return f"{before}, and then its process {process} was killed or crashed"
    there = "" if here else f" on {host}"
    return f"{before}; py-spy dump --pid {process}{there} shows where it is now"


def _first_line(error: str) -> str:
    line = error.partition("\n")[0].rstrip(":.")
    return f"{line}." if len(line) <= _FIRST_LINE else line[:_FIRST_LINE] + "..."
