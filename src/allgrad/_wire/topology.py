"""Ranks by host: what algorithms and error messages know of where ranks are."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ONE_HOST", "Topology", "by_host"]


@dataclass(frozen=True, eq=False)
class Topology:
    """Ranks by host, in the order of their lowest ranks; nothing where it was not found out.

    Compared by identity: it is part of a key that every call looks up.
    """

    hosts: tuple[tuple[int, ...], ...] = ()
    names: tuple[str, ...] = ()
    processes: tuple[int, ...] = field(default=(), repr=False)  # by rank
    crowded: bool = True  # some host has fewer cores than ranks, or it is not known

    @cached_property
    def host_of(self) -> tuple[int, ...]:
        """The number of each rank's host."""
        where = {rank: host for host, ranks in enumerate(self.hosts) for rank in ranks}
        return tuple(where[rank] for rank in sorted(where))

    @cached_property
    def consecutive(self) -> bool:
        """Whether the ranks of each host follow one another."""
        return all(ranks == tuple(range(ranks[0], ranks[-1] + 1)) for ranks in self.hosts)

    def name_of(self, rank: int) -> str:
        """The name of a rank's host; empty if it is not known."""
        return self.names[self.host_of[rank]] if self.hosts else ""


ONE_HOST = Topology()


def by_host(keys: Sequence[object]) -> tuple[tuple[int, ...], ...]:
    """Ranks with one key are on one host."""
    found: dict[object, list[int]] = {}
    for rank, key in enumerate(keys):
        found.setdefault(key, []).append(rank)
    return tuple(tuple(ranks) for ranks in found.values())
