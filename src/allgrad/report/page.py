"""Findings as a page: one HTML file with its style, its script and its data inside."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np

from allgrad.report.sample import sample, slices
from allgrad.report.text import plan_says, summary
from allgrad.report.units import nbytes, short_site

if TYPE_CHECKING:
    from pathlib import Path

    from allgrad.report.load import Kind
    from allgrad.report.model import Findings
    from allgrad.report.sample import Shown

__all__ = ["write_page"]

_MOST = 60_000  # events in the timeline
_LINES = 500


def write_page(found: Findings, path: Path) -> str:
    """Write the page; the result is a sentence about it."""
    shown = sample(found.matched, _MOST)
    data = json.dumps(_data(found, shown), separators=(",", ":"))
    page = _asset("page.html")
    # Data last: nothing in it is taken for a place to fill.
    for name, text in (
        ("STYLE", _asset("page.css")),
        ("SCRIPT", _asset("page.js")),
        ("DATA", data.replace("<", "\\u003c")),
    ):
        page = page.replace(f"[[{name}]]", text, 1)
    path.write_text(page)
    of = "" if shown.events == shown.total else f" of {shown.total:,}"
    return f"{path}: {nbytes(len(page))}, a timeline of {shown.events:,}{of} calls."


def _asset(name: str) -> str:
    return (files("allgrad.report") / "assets" / name).read_text()


def _data(found: Findings, shown: Shown) -> dict[str, Any]:
    recording = found.recording
    # A call that did not end gets room to be seen.
    room = 1.05 if any(not one.ended for one in found.last_calls) else 1.0
    return {
        "path": str(recording.path.absolute()),
        "summary": summary(found),
        "headlines": found.headlines,
        "span": (found.ended - found.began) / 1e3 * room,
        "hangs": found.hangs,
        "shown": [shown.events, shown.total],
        "kinds": [_kind(kind) for kind in recording.kinds],
        "groups": [group.title for group in recording.groups],
        "lanes": _lanes(found, shown),
        "ranks": [
            {
                "rank": one.rank,
                "host": one.host,
                "calls": one.calls,
                "in": one.in_calls / 1e3,
                "waits": one.waiting / 1e3,
                "caused": one.caused / 1e3,
                "last": one.last / one.matched if one.matched else 0,
                "late": one.late / one.matched if one.matched else 0,
                "by": one.lateness / 1e3,
                "slow": one.slow,
            }
            for one in found.ranks
        ],
        "lines": [
            {
                "call": line.name + (" backward" if line.backward else ""),
                "operation": line.operation,
                "dtype": line.dtype,
                "line": short_site(line.site),
                "site": line.site,
                "calls": line.calls,
                "bytes": line.nbytes,
                "in": line.in_calls / 1e3,
                "waits": line.waiting / 1e3,
                "algorithm": line.algorithms,
                "moving": line.moving / 1e3,
                "plan": plan_says(line),
                "skew": line.skew,
                "sizes": list(line.sizes.items()),
            }
            for line in found.lines[:_LINES]
        ],
        "slowest": [
            {
                **_kind(one.kind),
                "group": one.group,
                "number": one.number,
                "at": (one.began - found.began) / 1e3,
                "took": one.took / 1e3,
                "waited": one.waited / 1e3,
                "for": one.waited_for,
                "sizes": list(one.sizes.items()),
            }
            for one in found.slowest
        ],
        "mismatches": [
            {
                "group": one.group,
                "number": one.number,
                "ranks": list(one.by_rank.items()),
                "odd": one.odd,
                "at": (one.began - found.began) / 1e3,
            }
            for one in found.mismatches
        ],
        "last": [
            {
                **_kind(one.kind),
                "rank": one.rank,
                "group": one.group,
                "number": one.number,
                "at": (one.began - found.began) / 1e3,
                "ended": (one.ended - found.began) / 1e3 if one.ended else None,
                "error": one.error,
                "state": one.state,
            }
            for one in found.last_calls
        ],
    }


def _kind(kind: Kind) -> dict[str, Any]:
    return {
        "call": kind.title,
        "operation": kind.operation,
        "algorithm": kind.algorithm,
        "line": short_site(kind.site),
        "site": kind.site,
        "dtype": kind.dtype,
        "backward": kind.backward,
    }


def _lanes(found: Findings, shown: Shown) -> list[dict[str, Any]]:
    """For each rank and thread its calls as columns, by start; times in us since the beginning."""
    lanes: dict[tuple[int, int], list[np.ndarray[Any, Any]]] = {}
    names: dict[tuple[int, int], str] = {}
    for part in slices(found.recording, shown):
        took = np.where(part.end > 0, part.end - part.start, -1000)
        group = np.full(len(part.number), part.group.number)
        rows = np.stack(
            [
                *(part.start - found.began, took, part.waits, part.cause, part.kind),
                *(part.number, group, part.sent, part.received, part.failed),
            ]
        )
        for thread in np.unique(part.thread):
            key = part.file.rank, int(thread)
            lanes.setdefault(key, []).append(rows[:, part.thread == thread])
            names[key] = part.file.threads.get(int(thread), "")
    out = []
    for key in sorted(lanes):
        rows = np.concatenate(lanes[key], 1)
        rows = rows[:, np.argsort(rows[0], kind="stable")]
        start, took, waits, cause, kind, number, group, sent, received, failed = rows
        out.append(
            {
                "rank": key[0],
                "thread": names[key],
                "start": np.round(start / 1e3, 1).tolist(),
                "took": np.round(took / 1e3, 1).tolist(),
                "waits": np.round(waits / 1e3, 1).tolist(),
                "for": cause.tolist(),
                "kind": kind.tolist(),
                "number": number.tolist(),
                "group": group.tolist(),
                "sent": sent.tolist(),
                "received": received.tolist(),
                "failed": np.flatnonzero(failed).tolist(),
            }
        )
    return out
