"""Connections between ranks: whether they can be made, how fast they are, what the clocks say."""

from __future__ import annotations

import socket
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from allgrad._wire.probe import clock_offset, message_seconds
from allgrad._wire.world import sum_over_ranks
from allgrad.cli.doctor.findings import Finding, ok, problem, warning

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "Listener",
    "clock_findings",
    "connect",
    "connection_findings",
    "link_findings",
    "measure",
]

_SMALL, _LARGE = 8, 1 << 22
_SLOW_CLOCK = 0.05  # seconds: beyond it, times in the logs of two hosts are in the wrong order


class Listener:
    """A port that the next rank tries, at the address that Gloo will use."""

    def __init__(self, address: str) -> None:
        """Listen; ``at`` is where, ``refusal`` why not."""
        self.at, self.refusal = "", ""
        try:
            self._socket = socket.create_server((address, 0))
            self.at = f"{address}:{self._socket.getsockname()[1]}"
        except OSError as error:
            self.refusal = f"{address or 'no address'}: {error.strerror or error}"

    def close(self) -> None:
        """Stop listening."""
        if self.at:
            self._socket.close()


def connect(at: str, seconds: float) -> str:
    """Try to connect to another rank's listener; empty if that works, else why not."""
    host, _, port = at.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), seconds):
            return ""
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error) or "no answer"


def connection_findings(tried: Mapping[int, Sequence[str]]) -> list[Finding]:
    """Whether each rank reached the next one: rank -> (next rank, its address, why not)."""
    failed = {rank: row for rank, row in tried.items() if len(row) == 3 and row[2]}
    if not failed:
        return [ok("connections", f"each of {len(tried)} ranks reaches the next one")]
    return [
        problem(
            "connections",
            f"rank {rank} does not reach rank {peer} at {at}: {why}",
            "Ranks connect to each other directly, on ports that the system chooses.",
            "Open all ports between the hosts of the job, or set GLOO_SOCKET_IFNAME and "
            "NCCL_SOCKET_IFNAME to the network that they share.",
        )
        for rank, (peer, at, why) in sorted(failed.items())[:8]
    ]


def measure(
    rank: int, hosts: Sequence[Sequence[int]], device: torch.device
) -> dict[str, list[float]]:
    """Latency and bandwidth inside each host and between neighbouring hosts, one link at a time.

    A link's lower rank returns seconds of a small and of a large message; between hosts also how
    far the other clock is ahead, and the error of that.
    """
    pairs = [(ranks[0], ranks[1]) for ranks in hosts if len(ranks) > 1]
    heads = [ranks[0] for ranks in hosts]
    pairs += pairwise(heads)
    found = {}
    for a, b in pairs:
        if rank in {a, b}:
            peer, first = (b, True) if rank == a else (a, False)
            small = message_seconds(peer, first=first, nbytes=_SMALL, rounds=20, device=device)
            large = message_seconds(peer, first=first, nbytes=_LARGE, rounds=4, device=device)
            row = [small, large]
            if b in heads and a in heads:
                row += clock_offset(peer, first=first, rounds=10, device=device)
            if first:
                found[f"{a} {b}"] = row
        sum_over_ranks(torch.zeros(1, device=device))  # the next link waits for this one
    return found


def link_findings(
    measured: Mapping[str, Sequence[float]], hosts: Mapping[int, str]
) -> list[Finding]:
    """The slowest link of each kind, with a warning when one is far slower than its like."""
    findings = []
    for kind, inside in (("within a host", True), ("between hosts", False)):
        rows = {}
        for link, row in measured.items():
            a, b = map(int, link.split())
            if (hosts[a] == hosts[b]) == inside:
                rows[link] = (row[0] * 1e6, _LARGE / row[1] / 1e9)
        if not rows:
            continue
        slowest = min(rows, key=lambda link: rows[link][1])
        late = max(latency for latency, _ in rows.values())
        speeds = sorted(speed for _, speed in rows.values())
        found = f"{late:.0f} us, {speeds[0]:.2f} GB/s or better ({len(rows)} measured)"
        if len(speeds) > 2 and speeds[0] < speeds[len(speeds) // 2] / 3:
            findings.append(
                warning(
                    f"links {kind}",
                    f"ranks {' and '.join(slowest.split())}: {speeds[0]:.2f} GB/s, the median is "
                    f"{speeds[len(speeds) // 2]:.2f}",
                    "Every collective is as slow as its slowest link.",
                    "Look at that host's network card, cable and other load, or leave the host out.",
                )
            )
        else:
            findings.append(ok(f"links {kind}", found))
    return findings


def clock_findings(measured: Mapping[str, Sequence[float]]) -> list[Finding]:
    """Whether the hosts' clocks agree."""
    offsets = {link: row[2:4] for link, row in measured.items() if len(row) == 4}
    if not offsets:
        return [ok("clocks", "one host, one clock")]
    far = {link: o for link, o in offsets.items() if abs(o[0]) - o[1] > _SLOW_CLOCK}
    if far:
        link, (ahead, error) = max(far.items(), key=lambda item: abs(item[1][0]))
        a, b = link.split()
        return [
            warning(
                "clocks",
                f"the clock of rank {b} is {ahead * 1e3:+.0f} ms from that of rank {a} "
                f"(+- {error * 1e3:.1f} ms)",
                "Logs and traces of the two hosts do not line up; certificates and leases may fail.",
                "Run chrony or ntpd on every host.",
            )
        ]
    most = max(abs(o[0]) for o in offsets.values())
    return [ok("clocks", f"at most {most * 1e3:.1f} ms apart from host to host")]
