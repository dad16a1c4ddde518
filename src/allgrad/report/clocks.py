"""One clock for all ranks.

Ranks on one host share its monotonic clock: nothing is to be aligned. Between hosts, the calls tell.
No rank ends an all_reduce before the last one has started it, so each such call bounds how far the
clocks are apart, from both sides:

    host A          start ............. end          end of B   >=  last start of A
    host B                start ....... end          end of A   >=  last start of B

The narrowest bounds over all calls of a minute give the offset, to half their distance: about the
time of the fastest call. Clocks drift, hence a minute; between minutes the offset is interpolated.
Hosts without such calls (tensors on a device end for the host before they have arrived) keep the
offset of their wall clocks, as good as what sets those.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from allgrad.report.matching import NEVER, match

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from allgrad.report.load import RankFile, Recording
    from allgrad.report.matching import Matched

__all__ = ["align"]

_WINDOW = 60 * 10**9
_WAITS_FOR_ALL = {"all_reduce", "all_gather", "reduce_scatter"}


def align(recording: Recording) -> None:
    """Put the times of all ranks on the clock of the first rank's host, in place."""
    hosts: dict[str, list[RankFile]] = {}
    for file in recording.ranks:
        hosts.setdefault(file.header["boot"], []).append(file)
    reference, *others = hosts.values()
    if not others:
        recording.clocks = "All ranks share the clock of one host."
        return
    matched, by_wall = match(recording), []
    for files in others:
        wall = _wall(files[0]) - _wall(reference[0])
        for file in files:  # first by their wall clocks, so that offsets are small
            _shift(file, np.full(1, wall))
        bounds = [
            one for group in matched if len(one := _bounds(recording, group, reference, files))
        ]
        if bounds:
            times, offsets, precision = _windows(np.concatenate(bounds))
            for file in files:
                _shift(file, offsets, times)
            recording.precision = max(recording.precision, precision)
        else:
            by_wall.append(files[0].header["host"])
    recording.clocks = f"Clocks of {len(hosts)} hosts, aligned by their calls to {recording.precision / 1e3:,.0f} us."
    if by_wall:
        names = ", ".join(by_wall)
        recording.clocks = f"Clocks of {len(hosts)} hosts; by their wall clocks only: {names}."


def _wall(file: RankFile) -> int:
    """Add this to the monotonic time of a host to get its wall time."""
    return int(file.header["wall"]) - int(file.header["monotonic"])


def _shift(
    file: RankFile, offsets: NDArray[np.int64], times: NDArray[np.int64] | None = None
) -> None:
    events, unfinished = file.events, file.events.end == 0
    if not len(events):
        return
    if times is None or len(offsets) == 1:
        by = np.full(len(events), offsets[0], np.int64)
    else:
        by = np.interp(events.start, times, offsets).astype(np.int64)
    file.errors = {
        int(start + by[np.searchsorted(events.start, start)]): text
        for start, text in file.errors.items()
        if start <= events.start[-1]
    }
    events.start += by
    events.end += by
    events.end[unfinished] = 0
    file.closed += int(by[-1]) if file.closed else 0


def _bounds(
    recording: Recording, group: Matched, ours: list[RankFile], theirs: list[RankFile]
) -> NDArray[np.int64]:
    """For each call: when it was, the least and the most that the other host's clock can be behind."""
    rows_a = [row for row, file in enumerate(group.files) if file in ours]
    rows_b = [row for row, file in enumerate(group.files) if file in theirs]
    if not rows_a or not rows_b:
        return np.empty((0, 3), np.int64)
    waits = np.array([k.operation in _WAITS_FOR_ALL and k.host for k in recording.kinds])
    found = []
    for columns in group.columns():
        start, end = group.values("start", columns, 0), group.values("end", columns, 0)
        kind, failed = group.values("kind", columns, -1), group.values("failed", columns, 1)
        moved = np.minimum(group.values("sent", columns, 0), group.values("received", columns, 0))
        good = (end > 0).all(0) & (moved > 0).all(0) & (kind == kind[0]).all(0) & ~failed.any(0)
        good &= waits[kind[0]]
        start, end = start[:, good], end[:, good]
        least = start[rows_a].max(0) - end[rows_b].min(0)
        most = end[rows_a].min(0) - start[rows_b].max(0)
        found.append(np.stack([start[rows_b[0]], least, most], 1))
    return np.concatenate(found)


def _windows(
    bounds: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Times, offsets at those times, and how precise they are."""
    window = (bounds[:, 0] - bounds[:, 0].min()) // _WINDOW
    number = int(window.max()) + 1
    least, most = np.full(number, -NEVER), np.full(number, NEVER)
    np.maximum.at(least, window, bounds[:, 1])
    np.minimum.at(most, window, bounds[:, 2])
    used = np.bincount(window, minlength=number) > 0
    times = bounds[:, 0].min() + (np.arange(number) * 2 + 1) * (_WINDOW // 2)
    # Bounds that cross: the clocks drifted apart within a window by as much as they cross.
    precision = int(np.abs(most - least)[used].max()) // 2
    return times[used], ((least + most) // 2)[used], precision
