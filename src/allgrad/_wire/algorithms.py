"""Which algorithm moves the bytes: one table, measured, with the limits and the cost of each entry.

The first entry of an operation whose limit holds is taken; ``situation`` has the limits.

Gloo's own calls take up to five times as long as the algorithms here, on the host. With two ranks, only
all_reduce uses the star, and broadcast is never chunked. Gloo sends point to point only from host
memory. NCCL, and backends that were not measured, get their own call where it takes the sizes.

For experiments, ``with algorithms.using(all_gather="broadcasts"):`` takes one whatever the limits.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from allgrad._core.partition import even
from allgrad._wire import across_hosts, costs, eager, pairwise, repeated
from allgrad._wire import point_to_point as p2p
from allgrad._wire.costs import Cost
from allgrad._wire.groups import Backend
from allgrad._wire.hosts import find_topology
from allgrad._wire.situation import (
    COPIES_PIECE,
    FLAT_PIECE,
    STACKED_BLOCK,
    Situation,
    always,
    goes_around,
    has_star_exchange,
    is_linear,
    is_repeated,
    is_scattered,
    is_shared_by_hosts,
    is_small,
    is_summed_by_hosts,
    many_to_a_host,
    one_to_a_host,
    receives_first,
    star_sum,
)
from allgrad.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from torch import Tensor

    from allgrad._wire.calls import Call

__all__ = [
    "CHOSEN",
    "MOVE_PARTS",
    "TABLE",
    "Algorithm",
    "Choice",
    "Cost",
    "choose",
    "keep_choice",
    "using",
]


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


def _in_two_steps(s: Situation) -> Cost:
    parts = s._replace(piece=-(-s.piece // s.ranks), total=s.piece, can_add=False)
    first, second = (parts._replace(operation=name) for name in ("reduce_scatter", "all_gather"))
    return choose(first).cost(first).then(choose(second).cost(second))


TABLE: dict[str, tuple[Algorithm, ...]] = {
    "all_reduce": (
        Algorithm(
            "across_hosts",
            across_hosts.all_reduce,
            is_summed_by_hosts,
            costs.across_hosts_all_reduce,
        ),
        Algorithm("two_steps", _all_reduce_in_two_steps, lambda s: not s.can_add, _in_two_steps),
        Algorithm(
            "star",
            p2p.star_all_reduce,
            lambda s: s.gloo and s.piece <= star_sum(s) and not one_to_a_host(s),
            costs.star_all_reduce,
        ),
        Algorithm(
            "chunked",
            p2p.chunked_all_reduce,
            lambda s: s.gloo and not one_to_a_host(s),
            costs.chunked_all_reduce,
        ),
        Algorithm("backend", eager.all_reduce, always, costs.backend_all_reduce),
    ),
    "all_gather": (
        Algorithm("ring", across_hosts.ring_all_gather, goes_around, costs.ring_all_gather),
        Algorithm(
            "across_hosts",
            across_hosts.all_gather,
            is_shared_by_hosts,
            costs.across_hosts_all_gather,
        ),
        Algorithm("star", p2p.star_all_gather, is_small, costs.star_all_gather),
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
            "broadcasts", eager.all_gather_by_broadcasts, always, costs.broadcasts_all_gather
        ),
    ),
    "reduce_scatter": (
        Algorithm(
            "across_hosts",
            across_hosts.reduce_scatter,
            is_shared_by_hosts,
            costs.across_hosts_reduce_scatter,
        ),
        Algorithm("star", p2p.star_reduce_scatter, is_small, costs.star_reduce_scatter),
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
        Algorithm("backend_list", eager.reduce_scatter_list, always, costs.list_reduce_scatter),
    ),
    "all_to_all": (
        Algorithm(
            "star",
            p2p.star_all_to_all,
            has_star_exchange,
            costs.star_all_to_all,
        ),
        Algorithm(
            "repeated",
            repeated.all_to_all,
            is_repeated,
            costs.backend_all_to_all,
        ),
        Algorithm(
            "receives_first",
            pairwise.all_to_all_receives_first,
            # The backend's own call takes less processor time, but aborts where sizes do not fit.
            receives_first,
            costs.pairwise_all_to_all,
        ),
        Algorithm("pairwise", pairwise.all_to_all, lambda s: s.gloo, costs.pairwise_all_to_all),
        Algorithm("backend", eager.all_to_all, always, costs.backend_all_to_all),
    ),
    "broadcast": (
        Algorithm(
            "scattered", across_hosts.scattered_broadcast, is_scattered, costs.scattered_broadcast
        ),
        Algorithm(
            "across_hosts",
            across_hosts.broadcast,
            lambda s: many_to_a_host(s) and s.piece > FLAT_PIECE,
            costs.across_hosts_broadcast,
        ),
        Algorithm("linear", p2p.linear_broadcast, is_linear, costs.linear_broadcast),
        Algorithm("chunked", p2p.chunked_broadcast, lambda s: s.gloo, costs.chunked_broadcast),
        Algorithm("backend", eager.broadcast, always, costs.backend_broadcast),
    ),
    "reduce": (
        Algorithm("scattered", across_hosts.scattered_reduce, is_scattered, costs.scattered_reduce),
        Algorithm(
            "across_hosts",
            across_hosts.reduce,
            lambda s: many_to_a_host(s) and s.piece > FLAT_PIECE,
            costs.across_hosts_reduce,
        ),
        Algorithm("linear", p2p.linear_reduce, is_linear, costs.linear_reduce),
        Algorithm("chunked", p2p.chunked_reduce, lambda s: s.gloo, costs.chunked_reduce),
        Algorithm(
            "gather",
            eager.reduce_by_gather,
            lambda s: s.backend is Backend.GLOO or not s.can_add,
            costs.gather_reduce,
        ),
        Algorithm("backend", eager.reduce, always, costs.backend_reduce),
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
