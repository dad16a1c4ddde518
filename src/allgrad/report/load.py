"""A directory of rank files becomes arrays: the events of each rank, and the kinds of call they share."""

from __future__ import annotations

import json
import mmap
import struct
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from allgrad._wire.recorder import CLOSED_AT, EVENT_BYTES, FAILED, HEADER_BYTES, LARGE, MAGIC
from allgrad.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["Events", "Group", "Kind", "RankFile", "Recording", "load"]

_RAW = np.dtype([(name, np.uint64) for name in ("start", "end", "bytes", "what")])
assert _RAW.itemsize == EVENT_BYTES

_WORLD = "0"  # torch's name for the group of all ranks


class Kind(NamedTuple):
    """What many calls have in common."""

    name: str
    operation: str
    algorithm: str
    site: str
    dtype: str
    root: int
    host: bool
    backward: bool

    @property
    def title(self) -> str:
        """The call as a reader knows it."""
        return f"{self.name} backward" if self.backward else self.name


class Group(NamedTuple):
    """A process group, the same on all its ranks; ``generation`` counts groups of its name."""

    name: str
    members: tuple[int, ...]
    generation: int

    @property
    def title(self) -> str:
        """The group as a reader knows it; no two have the same."""
        some = ", ".join(map(str, self.members[:8])) + (", ..." if len(self.members) > 8 else "")
        ranks = "" if self.name == _WORLD else f" (ranks {some})"
        world = f" of world {self.generation + 1}" if self.generation else ""
        return f"group {self.name}{ranks}{world}"


@dataclass(slots=True)
class Events:
    """The calls of one rank, by start; times in ns. ``end`` is 0 for a call that has not ended."""

    start: NDArray[np.int64]
    end: NDArray[np.int64]
    failed: NDArray[np.bool_]
    sent: NDArray[np.int64]  # bytes of the input
    received: NDArray[np.int64]  # bytes of the result
    number: NDArray[np.int64]  # of the call on its group
    kind: NDArray[np.int32]
    group: NDArray[np.int16]
    thread: NDArray[np.int16]

    def __len__(self) -> int:
        return len(self.start)


@dataclass(slots=True)
class RankFile:
    """What one rank recorded."""

    rank: int
    header: dict[str, Any]
    closed: int  # when the recording ended, or 0
    events: Events
    dropped: int  # calls that the ring has overwritten
    threads: dict[int, str] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)  # by the start of their call
    ended_by: tuple[str, str] | None = None  # the error that ended the recording, and its line


@dataclass(slots=True)
class Recording:
    """The files of all ranks, with one numbering of kinds and groups."""

    path: Path
    ranks: list[RankFile]
    kinds: list[Kind]
    groups: list[Group]
    notes: list[str]
    precision: int = 0  # of the alignment of clocks, in ns
    clocks: str = ""

    def rank(self, rank: int) -> RankFile | None:
        return next((one for one in self.ranks if one.rank == rank), None)

    @property
    def total(self) -> int:
        """How many events there are."""
        return sum(len(one.events) for one in self.ranks)


def load(path: Path) -> Recording:
    """Read every rank's file in a directory, whether the job has ended or not."""
    files = [file for file in path.glob("rank-*.allgrad") if file.stem[5:].isdecimal()]
    files.sort(key=lambda file: int(file.stem[5:]))
    if not files:
        raise InputError(
            f"There is no recording in {path}.\nRecord with ag.recorded(path) or ALLGRAD_RECORD; "
            "a world of one rank sends nothing, and records nothing."
        )
    recording = Recording(path, [], [], [], [])
    kinds: dict[Kind, int] = {}
    groups: dict[Group, int] = {}
    for file in files:
        try:
            recording.ranks.append(_load_rank(file, kinds, groups))
        except InputError:
            raise
        except OSError as error:
            raise InputError(
                f"{file} cannot be read: {error.strerror}.\n"
                "Give the folder of a recording, whose files this user may read."
            ) from error
        except (ValueError, KeyError, IndexError, struct.error) as error:
            raise InputError(
                f"{file} is damaged or cut short: {error}.\n"
                "Copy it again, or leave it out: its rank is then reported as missing."
            ) from error
    recording.kinds, recording.groups = list(kinds), list(groups)
    _drop_strays(recording)
    missing = sorted(
        set(range(recording.ranks[0].header["world"])) - {one.rank for one in recording.ranks}
    )
    if missing:
        recording.notes.append(f"There is no file of rank {', '.join(map(str, missing))}.")
    dropped = sum(one.dropped for one in recording.ranks)
    if dropped:
        recording.notes.append(f"{dropped:,} older calls were overwritten: the ring was full.")
    return recording


def _drop_strays(recording: Recording) -> None:
    """Leave out files of an earlier recording, which another number of ranks wrote."""
    newest = max(recording.ranks, key=lambda one: int(one.header["wall"]))
    kept = [one for one in recording.ranks if one.header["world"] == newest.header["world"]]
    if len(kept) < len(recording.ranks):
        left = len(recording.ranks) - len(kept)
        recording.notes.append(f"{left} files of an earlier recording were left out.")
        recording.ranks = kept


def _load_rank(file: Path, kinds: dict[Kind, int], groups: dict[Group, int]) -> RankFile:
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[: len(MAGIC)] != MAGIC:
            raise InputError(f"{file} is not a recording, or of another version of allgrad.")
        header = json.loads(data[len(MAGIC) : CLOSED_AT].rstrip(b"\0"))
        (closed,) = struct.unpack_from("<Q", data, CLOSED_AT)
        end = HEADER_BYTES + header["calls"] * EVENT_BYTES
        table = _Table(data[end:], header["rank"], kinds, groups)
        # Unused places of the ring have no kind. Only the used part is read.
        ring: NDArray[Any] = np.frombuffer(data, _RAW, header["calls"], HEADER_BYTES)
        used = np.flatnonzero(ring["what"])
        ring = ring[: used[-1] + 1 if len(used) else 0]
        raw = _copy(ring)
        # One that was being written is whole by now.
        unfinished = np.flatnonzero(_ends(raw) == 0)
        raw[unfinished] = ring[unfinished]
        del ring
    events = _events(raw, table)
    return RankFile(
        header["rank"],
        header,
        closed,
        events,
        _dropped(events),
        table.threads,
        table.errors,
        table.ended_by,
    )


class _Table:
    """The table of one file: what its numbers for kinds and groups mean in all files."""

    def __init__(
        self, text: bytes, rank: int, kinds: dict[Kind, int], groups: dict[Group, int]
    ) -> None:
        self.kind = [0]
        self.group_of_kind = [0]
        self.thread_of_kind = [0]
        self.large: dict[int, tuple[int, int]] = {}  # bytes that an event has no room for, by kind
        self.threads: dict[int, str] = {}
        self.errors: dict[int, str] = {}
        self.ended_by: tuple[str, str] | None = None
        local_groups: list[int] = []
        seen: Counter[tuple[str, tuple[int, ...]]] = Counter()
        for line in text.split(b"\n")[:-1]:
            entry = json.loads(line)
            if "kind" in entry:
                kind = Kind(*(entry[name] for name in Kind._fields))
                self.kind.append(kinds.setdefault(kind, len(kinds)))
                self.group_of_kind.append(local_groups[entry["group"]])
                self.thread_of_kind.append(entry["thread"])
                if entry["sent"] or entry["received"]:
                    self.large[entry["kind"]] = entry["sent"], entry["received"]
            elif "error" in entry:
                self.errors[entry["start"]] = entry["error"]
            elif "ended" in entry:
                self.ended_by = entry["ended"], entry["site"]
            elif "members" in entry:
                name = entry["name"], tuple(entry["members"])
                group = Group(*name, seen[name])
                seen[name] += 1
                local_groups.append(groups.setdefault(group, len(groups)))
            else:
                self.threads[entry["thread"]] = entry["name"]
        if not self.threads:
            self.threads[0] = f"rank {rank}"


def _copy(ring: NDArray[Any]) -> NDArray[Any]:
    """In memory of its own, which goes back to the system at once: malloc would keep it."""
    raw: NDArray[Any] = np.frombuffer(mmap.mmap(-1, max(1, ring.nbytes)), _RAW, len(ring))
    raw[:] = ring
    return raw


def _events(raw: NDArray[Any], table: _Table) -> Events:
    kind = _halves(raw["what"])[1].astype(np.int32)
    kept: Any = (kind > 0) & (kind < len(table.kind))
    start = raw["start"].astype(np.int64)
    if np.any(start[1:] < start[:-1]):  # once around the ring, or several threads
        order = np.argsort(start, kind="stable")
        kept = order[kept[order]]
    elif kept.all():
        kept = slice(None)
    kind, end = kind[kept], _ends(raw)[kept]
    sent, received = _halves(raw["bytes"][kept])
    for number, (more_sent, more_received) in table.large.items():
        of_kind = kind == number
        sent[of_kind & (sent == LARGE)] = more_sent
        received[of_kind & (received == LARGE)] = more_received
    return Events(
        start[kept],
        end,
        (end > 0) & (raw["end"][kept] >= np.uint64(FAILED)),
        sent,
        received,
        _halves(raw["what"][kept])[0],
        np.asarray(table.kind, np.int32)[kind],
        np.asarray(table.group_of_kind, np.int16)[kind],
        np.asarray(table.thread_of_kind, np.int16)[kind],
    )


def _halves(words: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    low = (words & np.uint64(LARGE)).astype(np.int64)
    return low, (words >> np.uint64(32)).astype(np.int64)


def _ends(raw: NDArray[Any]) -> NDArray[np.int64]:
    """0 for a call that has not ended: an end before the start is of the event overwritten."""
    end = (raw["end"] & np.uint64(FAILED - 1)).astype(np.int64)
    end[end < raw["start"].astype(np.int64)] = 0
    return end


def _dropped(events: Events) -> int:
    """Numbers on a group count from 0: those below the first that is left were overwritten."""
    groups = np.unique(events.group)
    return int(sum(events.number[events.group == group].min() for group in groups))
