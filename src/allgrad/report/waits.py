"""Some calls of a group, as arrays by rank and call: times, bytes, and who waited for whom."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from allgrad.report.matching import NEVER

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from allgrad.report.load import Kind, Recording
    from allgrad.report.matching import Matched

__all__ = ["Calls", "look"]


class Calls(NamedTuple):
    """Arrays of [member, call]; ``cause``, by call, is the row of the member that was waited for."""

    start: NDArray[np.int64]  # NEVER where a member did not come
    end: NDArray[np.int64]  # 0 where it has not ended
    took: NDArray[np.int64]
    waits: NDArray[np.int64]
    cause: NDArray[np.int64]
    kind: NDArray[np.int64]
    sent: NDArray[np.int64]
    received: NDArray[np.int64]
    present: NDArray[np.bool_]


def look(recording: Recording, group: Matched, columns: slice | NDArray[np.int64]) -> Calls:
    """The calls in these columns."""
    start, end = group.values("start", columns, NEVER), group.values("end", columns, 0)
    kind = group.values("kind", columns, -1)
    sent, received = group.values("sent", columns, 0), group.values("received", columns, 0)
    took = np.where(end > 0, end - start, 0)
    waits, cause = _waiting(recording.kinds, start, took, kind)
    return Calls(start, end, took, waits, cause, kind, sent, received, kind >= 0)


def _waiting(
    kinds: list[Kind],
    start: NDArray[np.int64],
    took: NDArray[np.int64],
    kind: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """How long each rank waited in each call for others to start it, and the row it waited for.

    The last rank to start is who all waited for. Of a broadcast all wait for src alone, and in a
    reduce only dst waits. A rank never waits longer than it was in the call.
    """
    ranks = len(start)
    roots = np.array([k.root for k in kinds])[kind.max(0)]
    rooted = (roots >= 0) & (roots < ranks)
    broadcast = np.array([k.operation == "broadcast" for k in kinds])[kind.max(0)]
    cause = np.where(rooted & broadcast, roots, start.argmax(0))
    begun = np.take_along_axis(start, cause[None], 0)[0]
    waits = np.clip(begun - start, 0, took)
    only_root = rooted & ~broadcast
    waits[only_root & (np.arange(ranks)[:, None] != roots)] = 0
    return waits, cause
