"""Findings as a trace in Chrome's JSON format, which Perfetto and chrome://tracing open.

A slice is a call of one rank: processes are ranks, threads are threads. A call that has not ended
is a slice without end. An arrow leads from the rank that was waited for to each that waited.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from allgrad.report.sample import sample, slices
from allgrad.report.units import nbytes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from allgrad.report.model import Findings
    from allgrad.report.sample import Shown, Slices

__all__ = ["write_trace"]

_MOST = 400_000  # slices


def write_trace(found: Findings, path: Path) -> str:
    """Write the trace; the result is a sentence about it."""
    shown = sample(found.matched, _MOST)
    with path.open("w") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for number, event in enumerate(_events(found, shown)):
            file.write(("" if number == 0 else ",\n") + json.dumps(event, separators=(",", ":")))
        file.write("\n]}\n")
    of = "" if shown.events == shown.total else f" of {shown.total:,}"
    size = nbytes(path.stat().st_size)
    return f"{path}: {size}, {shown.events:,}{of} calls. Open it at https://ui.perfetto.dev."


def _events(found: Findings, shown: Shown) -> Iterator[dict[str, Any]]:
    for one in found.recording.ranks:
        name = f"rank {one.rank} on {one.header['host']}"
        yield _about(one.rank, 0, "process_name", name=name)
        yield _about(one.rank, 0, "process_sort_index", sort_index=one.rank)
        for thread, words in one.threads.items():
            yield _about(one.rank, thread, "thread_name", name=words)
    # The thread of every call that was waited for: where its arrows begin.
    parts = list(slices(found.recording, shown))
    thread_of = {
        (part.file.rank, part.group.number, int(number)): int(thread)
        for part in parts
        for number, thread in zip(part.number, part.thread, strict=True)
        if thread
    }
    arrow = 0
    for part in parts:
        for at in range(len(part.number)):
            slice_ = _slice(found, part, at)
            yield slice_
            if part.waits[at] <= 0:
                continue
            arrow += 1
            cause, number = int(part.cause[at]), int(part.number[at])
            thread = thread_of.get((cause, part.group.number, number), 0)
            when = {"ts": _us(found, part.begun[at]), "cat": "waits", "name": "waits for"}
            yield {"ph": "s", "id": arrow, "pid": cause, "tid": thread, **when}
            end = {"pid": part.file.rank, "tid": slice_["tid"], "bp": "e"}
            yield {"ph": "f", "id": arrow, **end, **when}


def _about(pid: int, tid: int, what: str, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": args}


def _us(found: Findings, ns: int) -> float:
    return (int(ns) - found.began) / 1e3


def _slice(found: Findings, part: Slices, at: int) -> dict[str, Any]:
    kind, end = found.recording.kinds[part.kind[at]], int(part.end[at])
    args = {
        "call": int(part.number[at]),
        "group": part.group.group.name,
        "operation": kind.operation,
        "algorithm": kind.algorithm,
        "line": kind.site,
        "dtype": kind.dtype,
        "bytes": int(part.sent[at]),
        "result bytes": int(part.received[at]),
    }
    if part.waits[at] > 0:
        args["waited (us)"] = float(part.waits[at]) / 1e3
        args["waited for rank"] = int(part.cause[at])
    if part.failed[at]:
        error = part.file.errors.get(int(part.start[at]), "")
        args["error"] = error.partition("\n")[0] or "raised"
    event: dict[str, Any] = {
        "ph": "X" if end else "B",
        "name": kind.title,
        "cat": "backward" if kind.backward else "forward",
        "pid": part.file.rank,
        "tid": int(part.thread[at]),
        "ts": _us(found, part.start[at]),
        "args": args,
    }
    if end:
        event["dur"] = (end - int(part.start[at])) / 1e3
    return event
