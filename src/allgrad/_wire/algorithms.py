"""Which algorithm moves the bytes: one table, measured, with the limits and the cost of each entry.

The first entry of an operation whose limit holds is taken. A limit may depend only on what every
rank knows (a ``Situation``), so that all ranks take the same algorithm.

Gloo's own calls take up to five times as long as the algorithms here, on the host. Small messages
take few steps; larger ones keep every rank at work. The limits are where that was best, or nearly
so, both with 4 ranks on 2 cores and with a core for every rank. With two ranks, only all_reduce
uses the star, and broadcast is never chunked. Gloo sends point to point only from host memory.
NCCL, and backends that were not measured, get their own call where it takes the sizes.

For experiments, ``with algorithms.using(all_gather="broadcasts"):`` takes one whatever the limits.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from allgrad._core.partition import even
from allgrad._wire import across_hosts, costs, eager, pairwise, repeated
from allgrad._wire import point_to_point as p2p
from allgrad._wire.costs import Cost
from allgrad._wire.groups import Backend
from allgrad._wire.hosts import find_topology
from allgrad._wire.topology import ONE_HOST, Topology
from allgrad.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from torch import Tensor

    from allgrad._wire.calls import Call

__all__ = [
    "CHOSEN",
    "MOVE_PARTS",
    "PART",
    "TABLE",
    "Algorithm",
    "Choice",
    "Cost",
    "Situation",
    "choose",
    "keep_choice",
    "using",
]

KiB, MiB = 1024, 1024 * 1024
# Limits in bytes.
STAR_TOTAL = 64 * KiB  # of all ranks together
STAR_SUM = COPIES_PIECE = 256 * KiB  # of one rank's piece
STAR_SUM_OF_TWO = 4 * MiB
# Where ranks outnumber cores, few messages matter more than busy ranks.
STAR_SUM_CROWDED = 1 * MiB
STAR_EXCHANGE_CROWDED = 1 * MiB  # of all ranks together
STACKED_BLOCK = 128 * KiB  # of a reduce_scatter, added up when all are there
REPEATED_BLOCK = 64 * KiB  # of larger ones, receives must be announced first between hosts
PART = 64 * KiB  # of a block: larger ones travel by themselves rather than being put in order
LINEAR_TOTAL = 4 * MiB
FLAT_TOTAL = 64 * KiB  # of all ranks together, where hosts are several
FLAT_PIECE = 16 * KiB


class Situation(NamedTuple):
    """What an algorithm may depend on; the same on every rank.

    ``piece``: bytes of the largest piece (of reduce_scatter: of the largest block of the result).
    ``total``: bytes of all pieces together. ``equal``: all have one size. ``can_add``: the
    backend knows how to add the dtype. ``topology``: the ranks by host.
    """

    operation: str
    backend: Backend
    on_host: bool
    ranks: int
    piece: int
    total: int
    equal: bool = True
    can_add: bool = True
    topology: Topology = ONE_HOST

    @property
    def gloo(self) -> bool:
        """Gloo, tensors on the host: where point-to-point messages pay."""
        return self.backend is Backend.GLOO and self.on_host

    @property
    def hosts(self) -> int:
        """How many hosts there are, as far as is known."""
        return max(1, len(self.topology.hosts))

    @property
    def gloo_device(self) -> bool:
        """Gloo, tensors on a device: Gloo copies them through the host."""
        return self.backend is Backend.GLOO and not self.on_host


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One way to run an operation: its function, where it is used, and what it costs there."""

    name: str
    run: Callable[..., Tensor]
    limit: Callable[[Situation], bool]
    cost: Callable[[Situation], Cost]


def _all_reduce_in_two_steps(call: Call, x: Tensor, *_: Any) -> Tensor:
    """For dtypes that the backend cannot add: reduce_scatter, then all_gather."""
    counts, row = even(x.numel(), call.size), x.element_size()
    sizes = counts[0] * row, x.nbytes, len(set(counts)) == 1
    about = call.group.backend(x.device), x.is_cpu, call.size, *sizes, False, find_topology(call)
    own = choose(Situation("reduce_scatter", *about)).run(call, x.view(-1), counts)
    return choose(Situation("all_gather", *about)).run(call, own, counts).view(x.shape)


def _always(_: Situation) -> bool:
    return True


def _small(s: Situation) -> bool:
    return s.gloo and s.ranks > 2 and s.total <= STAR_TOTAL


def _receives_first(s: Situation) -> bool:
    """Not where ranks share cores, nor for the short messages of several ranks."""
    small = s.equal and s.ranks > 2 and s.total <= STAR_TOTAL
    return s.gloo and (s.hosts > 1 or not (s.topology.crowded or small))


def _star_sum(s: Situation) -> int:
    if s.ranks == 2:
        return STAR_SUM_OF_TWO
    return STAR_SUM_CROWDED if s.topology.crowded and s.hosts == 1 else STAR_SUM


def _star_exchange(s: Situation) -> bool:
    """Where a message costs more than it carries: between hosts, or where ranks share cores."""
    limit = STAR_TOTAL if s.hosts > 1 else STAR_EXCHANGE_CROWDED
    costly = s.hosts > 1 or s.topology.crowded
    return s.gloo and s.equal and s.ranks > 2 and costly and s.total <= limit


def _linear(s: Situation) -> bool:
    """A root behind a link sends, or receives, every rank's bytes over it."""
    return s.gloo and (s.ranks == 2 or s.total <= (LINEAR_TOTAL if s.hosts == 1 else FLAT_TOTAL))


def _one_to_a_host(s: Situation) -> bool:
    """Three hosts or more with one rank each: the backend's ring sends a sum as often as it must."""
    return 2 < s.hosts == s.ranks and s.piece > FLAT_PIECE


def _many_to_a_host(s: Situation) -> bool:
    """Several hosts, some with several ranks: flat algorithms send them the same bytes."""
    return s.gloo and 1 < s.hosts < s.ranks


def _in_two_steps(s: Situation) -> Cost:
    parts = s._replace(piece=-(-s.piece // s.ranks), total=s.piece, can_add=False)
    first, second = (parts._replace(operation=name) for name in ("reduce_scatter", "all_gather"))
    return choose(first).cost(first).then(choose(second).cost(second))


TABLE: dict[str, tuple[Algorithm, ...]] = {
    "all_reduce": (
        Algorithm(
            "across_hosts",
            across_hosts.all_reduce,
            lambda s: (_many_to_a_host(s) or (s.gloo and s.hosts == 2)) and s.piece > FLAT_PIECE,
            costs.across_hosts_all_reduce,
        ),
        Algorithm("two_steps", _all_reduce_in_two_steps, lambda s: not s.can_add, _in_two_steps),
        Algorithm(
            "star",
            p2p.star_all_reduce,
            lambda s: s.gloo and s.piece <= _star_sum(s) and not _one_to_a_host(s),
            costs.star_all_reduce,
        ),
        Algorithm(
            "chunked",
            p2p.chunked_all_reduce,
            lambda s: s.gloo and not _one_to_a_host(s),
            costs.chunked_all_reduce,
        ),
        Algorithm("backend", eager.all_reduce, _always, costs.backend_all_reduce),
    ),
    "all_gather": (
        Algorithm(
            "across_hosts",
            across_hosts.all_gather,
            lambda s: _many_to_a_host(s) and s.total > FLAT_TOTAL,
            costs.across_hosts_all_gather,
        ),
        Algorithm("star", p2p.star_all_gather, _small, costs.star_all_gather),
        Algorithm(
            "copies",
            eager.all_gather_by_copies,
            lambda s: s.gloo_device and s.piece <= COPIES_PIECE,
            costs.copies_all_gather,
        ),
        Algorithm("pairwise", pairwise.all_gather, lambda s: s.gloo, costs.pairwise_all_gather),
        Algorithm(
            "backend",
            eager.all_gather,
            lambda s: s.equal and s.backend is not Backend.GLOO,
            costs.backend_all_gather,
        ),
        Algorithm(
            "backend_list",
            eager.all_gather_list,
            lambda s: s.backend is Backend.NCCL,
            costs.list_all_gather,
        ),
        Algorithm(
            "broadcasts", eager.all_gather_by_broadcasts, _always, costs.broadcasts_all_gather
        ),
    ),
    "reduce_scatter": (
        Algorithm(
            "across_hosts",
            across_hosts.reduce_scatter,
            lambda s: _many_to_a_host(s) and s.total > FLAT_TOTAL,
            costs.across_hosts_reduce_scatter,
        ),
        Algorithm("star", p2p.star_reduce_scatter, _small, costs.star_reduce_scatter),
        Algorithm(
            "pairwise_stacked",
            pairwise.stacked_reduce_scatter,
            lambda s: s.gloo and s.piece <= STACKED_BLOCK,
            costs.stacked_reduce_scatter,
        ),
        Algorithm(
            "pairwise",
            pairwise.reduce_scatter,
            lambda s: s.gloo,
            costs.pairwise_reduce_scatter,
        ),
        Algorithm(
            "exchange",
            eager.reduce_scatter_by_exchange,
            lambda s: (
                s.backend is Backend.GLOO
                or not s.can_add
                or not (s.equal or s.backend is Backend.NCCL)
            ),
            costs.exchange_reduce_scatter,
        ),
        Algorithm("backend", eager.reduce_scatter, lambda s: s.equal, costs.backend_reduce_scatter),
        Algorithm("backend_list", eager.reduce_scatter_list, _always, costs.list_reduce_scatter),
    ),
    "all_to_all": (
        Algorithm(
            "star",
            p2p.star_all_to_all,
            _star_exchange,
            costs.star_all_to_all,
        ),
        Algorithm(
            "repeated",
            repeated.all_to_all,
            lambda s: s.gloo and s.equal and s.hosts > 1 and s.piece <= s.ranks * REPEATED_BLOCK,
            costs.backend_all_to_all,
        ),
        Algorithm(
            "receives_first",
            pairwise.all_to_all_receives_first,
            # The backend's own call takes less processor time, but aborts where sizes do not fit.
            _receives_first,
            costs.pairwise_all_to_all,
        ),
        Algorithm("pairwise", pairwise.all_to_all, lambda s: s.gloo, costs.pairwise_all_to_all),
        Algorithm("backend", eager.all_to_all, _always, costs.backend_all_to_all),
    ),
    "broadcast": (
        Algorithm(
            "across_hosts",
            across_hosts.broadcast,
            lambda s: _many_to_a_host(s) and s.piece > FLAT_PIECE,
            costs.across_hosts_broadcast,
        ),
        Algorithm("linear", p2p.linear_broadcast, _linear, costs.linear_broadcast),
        Algorithm("chunked", p2p.chunked_broadcast, lambda s: s.gloo, costs.chunked_broadcast),
        Algorithm("backend", eager.broadcast, _always, costs.backend_broadcast),
    ),
    "reduce": (
        Algorithm(
            "across_hosts",
            across_hosts.reduce,
            lambda s: _many_to_a_host(s) and s.piece > FLAT_PIECE,
            costs.across_hosts_reduce,
        ),
        Algorithm("linear", p2p.linear_reduce, _linear, costs.linear_reduce),
        Algorithm("chunked", p2p.chunked_reduce, lambda s: s.gloo, costs.chunked_reduce),
        Algorithm(
            "gather",
            eager.reduce_by_gather,
            lambda s: s.backend is Backend.GLOO or not s.can_add,
            costs.gather_reduce,
        ),
        Algorithm("backend", eager.reduce, _always, costs.backend_reduce),
    ),
}

_forced: dict[str, Algorithm] = {}
_ADDED_BY_BACKEND = frozenset(
    {eager.all_reduce, eager.reduce, eager.reduce_scatter, eager.reduce_scatter_list}
)


MOVE_PARTS = frozenset({pairwise.all_to_all, pairwise.all_to_all_receives_first})

# Choices made before: by operation, group, dtype, device and sizes. Making a Situation for each call
# would take a tenth of a small one.
CHOSEN: dict[tuple[Any, ...], Choice] = {}
_MOST_CHOICES = 4096


class Choice:
    """The algorithm of calls that are alike; one object for each key of ``CHOSEN``.

    ``nbytes``: of the input and of the result, where all these calls have the same.
    """

    __slots__ = ("algorithm", "nbytes", "operation", "run")

    def __init__(
        self, operation: str, algorithm: Algorithm, piece: int, total: int, equal: bool
    ) -> None:
        """With its function at hand."""
        self.operation, self.algorithm, self.run = operation, algorithm, algorithm.run
        ends = {"all_gather": (piece, total), "reduce_scatter": (total, piece)}
        self.nbytes = ends.get(operation, (piece, piece)) if equal else None


def keep_choice(key: tuple[Any, ...], algorithm: Algorithm) -> Choice:
    """Remember the choice for the next call like it; a key begins with the operation and ends with the sizes."""
    if len(CHOSEN) >= _MOST_CHOICES:
        CHOSEN.clear()
    CHOSEN[key] = choice = Choice(key[0], algorithm, *key[-1])
    return choice


def choose(s: Situation) -> Algorithm:
    """The algorithm for a situation."""
    forced = _forced.get(s.operation)
    if forced is not None and (s.can_add or forced.run not in _ADDED_BY_BACKEND):
        return forced
    return next(entry for entry in TABLE[s.operation] if entry.limit(s))


@contextlib.contextmanager
def using(**names: str) -> Generator[None]:
    """Within this block, on every rank alike, take these algorithms: ``using(reduce="linear")``.

    One may ask more than the table does: ``backend`` takes equal counts only.
    """
    before = dict(_forced)
    for operation, name in names.items():
        found = {entry.name: entry for entry in TABLE.get(operation, ())}
        if name not in found:
            known = "; ".join(
                f"{one}: {', '.join(entry.name for entry in entries)}"
                for one, entries in TABLE.items()
            )
            _forced.clear()
            _forced.update(before)
            raise InputError(
                f"algorithms.using: {operation} has no algorithm {name!r}.\nThere are {known}."
            )
        _forced[operation] = found[name]
    CHOSEN.clear()
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(before)
        CHOSEN.clear()
