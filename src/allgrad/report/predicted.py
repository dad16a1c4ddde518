"""What ``allgrad plan`` says of the calls in a recording: time, and the algorithm it would choose."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from allgrad._wire.algorithms import TABLE
from allgrad._wire.groups import Backend
from allgrad._wire.link_model import LOOPBACK, predict, with_given
from allgrad._wire.situation import Situation
from allgrad._wire.topology import ONE_HOST, Topology

if TYPE_CHECKING:
    from collections.abc import Sequence

    from allgrad._wire.link_model import Links
    from allgrad.report.load import Recording
    from allgrad.report.model import Line

__all__ = ["predict_lines"]

_PIECES_DIFFER = {"all_gather", "reduce_scatter"}


def predict_lines(lines: Sequence[Line], recording: Recording, links: Links | None) -> None:
    """Set ``planned`` of each line of calls in host memory: those on a device end later than seen.

    Without a table of ``links`` that of one host is taken, and nothing is said of several hosts.
    """
    cores = min((one.header.get("cores", 0) for one in recording.ranks), default=0) or None
    table = with_given(LOOPBACK, cores=cores) if links is None else links
    for line in lines:
        topology = _topology(recording, line.members)
        if not line.on_host or len(line.members) < 2 or not _is_known(line):
            continue
        if topology is not ONE_HOST and table.between_bandwidth is None:
            continue
        s = _situation(line, topology)
        ran = max(line.algorithms, key=lambda name: line.algorithms[name])
        entry = next((one for one in TABLE.get(line.operation, ()) if one.name == ran), None)
        if entry is not None:
            chosen = predict(s, table)
            line.planned = chosen.algorithm, round(predict(s, table, entry).seconds * 1e9)


def _is_known(line: Line) -> bool:
    """Gathers, scatters and permutes are exchanges too; only of even ones the bytes of each are known."""
    return line.operation != "all_to_all" or (
        line.name == "all_to_all" and len(set(line.sizes.values())) == 1
    )


def _situation(line: Line, topology: Topology) -> Situation:
    """The call as ranks chose its algorithm: by the mean of its sizes."""
    ranks, sizes = len(line.members), list(line.sizes.values())
    piece, equal = max(sizes), len(set(sizes)) == 1
    total = sum(sizes) if line.operation in _PIECES_DIFFER else piece * ranks
    return Situation(
        line.operation, Backend.GLOO, True, ranks, piece, total, equal, topology=topology
    )


def _topology(recording: Recording, members: Sequence[int]) -> Topology:
    hosts: dict[tuple[str, str], list[int]] = defaultdict(list)
    for at, rank in enumerate(members):
        file = recording.rank(rank)
        if file is not None:
            hosts[file.header["host"], file.header["boot"]].append(at)
    if len(hosts) <= 1:
        return ONE_HOST
    return Topology(tuple(map(tuple, hosts.values())), tuple(name for name, _ in hosts))
