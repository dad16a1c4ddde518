"""How long a call takes and how much memory: the cost of its algorithm, and a table of links.

    time = overhead + steps * latency + max(work, bytes between hosts / their bandwidth)
    work = (messages * message + bytes / bandwidth + local bytes / memory bandwidth) * crowding

``crowding``: ranks of a host share its cores, so work takes longer by the busy ranks for each core.
Algorithms of a backend have a latency and a price of a message of their own, and one of the call.

Limits: equal pieces, idle machine, no two calls at once, hosts with equally many ranks; the links of
a host are alike. Caches are not modelled: memory has one bandwidth.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from allgrad._wire.algorithms import choose
from allgrad._wire.groups import Backend
from allgrad._wire.situation import Situation
from allgrad._wire.topology import ONE_HOST, Topology
from allgrad.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from allgrad._wire.algorithms import Algorithm
    from allgrad._wire.costs import Cost

__all__ = [
    "LOOPBACK",
    "Links",
    "Prediction",
    "fit",
    "host_cores",
    "predict",
    "seconds",
    "situation",
    "with_given",
    "world",
]


@dataclass(frozen=True, slots=True)
class Links:
    """What links and ranks can do. Seconds, and bytes in a second, sent and received together.

    ``between_*`` are those of a host's link to other hosts, its bandwidth that of each direction; None:
    as within a host.
    """

    overhead: float  # of a call, before anything moves
    latency: float  # until a message of ours has arrived and its receiver goes on
    message: float  # a rank's work for a message of ours
    bandwidth: float
    memory_bandwidth: float
    backend_call: float
    backend_latency: float
    backend_message: float
    cores: int  # of a host
    between_latency: float | None = None
    between_bandwidth: float | None = None
    about: str = ""  # where it was measured

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Links:
        """What ``write`` wrote; ``InputError`` if it is not that."""
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise InputError(f"{path} holds no table of links: {error}.") from error
        names = {field.name for field in fields(cls)}
        if not isinstance(found, dict) or not names >= set(found) >= _NEEDED:
            raise InputError(
                f"{path} holds no table of links.\nMake one with `allgrad bench --calibrate FILE`."
            )
        wrong = [
            name
            for name, value in found.items()
            if name != "about" and value is not None
            if not isinstance(value, int | float) or value < 0 or (value == 0 and name in _RATES)
        ]
        if wrong:
            raise InputError(f"{path}: {', '.join(wrong)} must be positive numbers.")
        return cls(**found)


# Measured by benchmarks/plan.py (benchmarks/results/plan.json), two digits.
LOOPBACK = Links(
    overhead=25e-6,
    latency=87e-6,
    message=31e-6,
    bandwidth=2.4e9,
    memory_bandwidth=11e9,
    backend_call=45e-6,
    backend_latency=50e-6,
    backend_message=31e-6,
    cores=2,
    about="Gloo over the loopback of a host with 2 cores",
)
_RATES = {"bandwidth", "memory_bandwidth", "between_bandwidth", "cores"}
_NEEDED = {field.name for field in fields(Links)} - {
    *("between_latency", "between_bandwidth", "about")
}


class Prediction(NamedTuple):
    """One call: its algorithm, seconds, and bytes that the busiest rank allocates."""

    algorithm: str
    seconds: float
    memory: float


def predict(s: Situation, links: Links, algorithm: Algorithm | None = None) -> Prediction:
    """What the chosen algorithm, or this one, takes."""
    entry = choose(s) if algorithm is None else algorithm
    cost = entry.cost(s)
    return Prediction(entry.name, seconds(cost, s, links), cost.memory)


def seconds(cost: Cost, s: Situation, links: Links) -> float:
    """The time of one call."""
    prices = torch.tensor(_prices(links), dtype=torch.float64)
    counts = torch.tensor(_counts(cost, s, links.cores), dtype=torch.float64)
    if s.hosts == 1 or links.between_bandwidth is None:
        return float(counts @ prices)
    waits, work = counts[:_WAITS] @ prices[:_WAITS], counts[_WAITS:] @ prices[_WAITS:]
    within = links.backend_latency if cost.calls else links.latency
    waits += cost.steps * max(0.0, (links.between_latency or 0.0) - within)
    return float(waits + max(float(work), cost.between / links.between_bandwidth))


_WAITS = 4  # terms that are no work


def _counts(cost: Cost, s: Situation, cores: int) -> list[float]:
    """How often a call pays each of the prices."""
    crowding = max(1.0, s.ranks / s.hosts * cost.average / cores)
    ours = not cost.calls
    messages = crowding * cost.messages
    return [
        1.0,
        cost.calls,
        cost.steps * ours,
        cost.steps * (not ours),
        messages * ours,
        messages * (not ours),
        crowding * cost.nbytes,
        crowding * cost.local,
    ]


def _prices(links: Links) -> list[float]:
    return [
        *(links.overhead, links.backend_call, links.latency, links.backend_latency),
        *(links.message, links.backend_message, 1 / links.bandwidth, 1 / links.memory_bandwidth),
    ]


def fit(measured: Sequence[tuple[Cost, Situation, float]], cores: int, about: str) -> Links:
    """The table that explains measured seconds best, by relative error; no price is negative."""
    counts = torch.tensor([_counts(cost, s, cores) for cost, s, _ in measured], dtype=torch.float64)
    times = torch.tensor([time for *_, time in measured], dtype=torch.float64)
    rows = counts / times[:, None]
    weights = torch.ones_like(times)
    for _ in range(20):  # large errors count less than their squares
        prices = _not_negative(rows * weights[:, None], weights)
        weights = (rows @ prices - 1).abs().clamp(min=0.1).rsqrt()
    overhead, call, latency, backend_latency, message, backend_message, byte, local = (
        prices.tolist()
    )
    least = 1e-15  # what could not be told from nothing
    return Links(
        *(overhead, latency, message, 1 / max(byte, least), 1 / max(local, least), call),
        *(backend_latency, backend_message, cores),
        about=about,
    )


def _not_negative(rows: Tensor, want: Tensor) -> Tensor:
    """Least squares; what would be negative is left out, the most negative first."""
    used = list(range(rows.shape[1]))
    while True:
        found = torch.linalg.lstsq(rows[:, used], want[:, None], driver="gelsd").solution[:, 0]
        if bool((found >= 0).all()):
            break
        used.pop(int(found.argmin()))
    prices = rows.new_zeros(rows.shape[1])
    prices[used] = found
    return prices


def world(ranks: int, ranks_per_host: int) -> Topology:
    """Hosts with so many ranks each."""
    if ranks <= ranks_per_host:
        return ONE_HOST
    starts = range(0, ranks, ranks_per_host)
    hosts = tuple(tuple(range(n, min(ranks, n + ranks_per_host))) for n in starts)
    return Topology(hosts, tuple(f"host {n}" for n in range(len(hosts))))


def situation(
    operation: str,
    ranks: int,
    nbytes: int,
    *,
    backend: Backend = Backend.GLOO,
    topology: Topology = ONE_HOST,
) -> Situation:
    """A call in which every rank passes ``nbytes``."""
    piece, total = nbytes, ranks * nbytes
    if operation == "reduce_scatter":
        piece, total = -(-nbytes // ranks), nbytes
    on_host = backend is Backend.GLOO
    return Situation(operation, backend, on_host, ranks, piece, total, topology=topology)


def with_given(links: Links, **given: float | None) -> Links:
    """The table with what is given in place of its own."""
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return replace(links, **changes)


def host_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
