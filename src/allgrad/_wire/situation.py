"""What an algorithm may depend on, and the limits between algorithms, as measured.

A limit may depend only on what every rank knows (a ``Situation``), so that all ranks take the same
algorithm. Small messages take few steps; larger ones keep every rank at work, and cross a link between
hosts no more often than they must. The limits are where that was best, or nearly so, both with 4 ranks on
2 cores and with a core for every rank (``allgrad bench``); between hosts at 200 Mbit/s, at 1 Gbit/s and
without a limit (``benchmarks/host_algorithms.py``).
"""

from __future__ import annotations

from typing import NamedTuple

from allgrad._wire.groups import Backend
from allgrad._wire.topology import ONE_HOST, Topology

__all__ = [
    "COPIES_PIECE",
    "FLAT_PIECE",
    "PART",
    "STACKED_BLOCK",
    "STAR_TOTAL",
    "STAR_TOTAL_CROWDED",
    "Situation",
    "always",
    "goes_around",
    "has_star_exchange",
    "is_linear",
    "is_repeated",
    "is_scattered",
    "is_shared_by_hosts",
    "is_small",
    "is_summed_by_hosts",
    "many_to_a_host",
    "one_to_a_host",
    "receives_first",
    "star_sum",
    "star_total",
]

KiB, MiB = 1024, 1024 * 1024
# Limits in bytes.
STAR_TOTAL = 64 * KiB  # of all ranks together
STAR_SUM = COPIES_PIECE = 256 * KiB  # of one rank's piece
STAR_SUM_OF_TWO = 4 * MiB
# Where ranks outnumber cores, few messages matter more than busy ranks.
STAR_SUM_CROWDED = 1 * MiB
STAR_TOTAL_CROWDED = 640 * KiB  # of all ranks together
STAR_EXCHANGE_CROWDED = 1 * MiB  # likewise
STACKED_BLOCK = 128 * KiB  # of a reduce_scatter, added up when all are there
REPEATED_BLOCK = 16 * KiB  # between hosts
PART = 64 * KiB  # of a block: larger ones travel by themselves rather than being put in order
LINEAR_TOTAL = 4 * MiB
# Where hosts are several: up to these, few steps matter more than bytes that cross a link more than once,
# as measured at 200 Mbit/s, 1 Gbit/s and more (benchmarks/host_algorithms.py).
FLAT_TOTAL = 16 * KiB  # of all ranks together
FLAT_PIECE = 8 * KiB
FLAT_ALONE = 16 * KiB  # of a piece, with one rank on each host
RING_PIECE = 64 * KiB  # of which each of many steps carries one
SCATTERED_PIECE = 128 * KiB  # from or to one root, with three hosts or more
ROOT_TOTAL = 64 * KiB  # of all ranks together, from or to one root


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


def always(_: Situation) -> bool:
    return True


def is_small(s: Situation) -> bool:
    return s.gloo and s.ranks > 2 and s.total <= star_total(s)


def star_total(s: Situation) -> int:
    return STAR_TOTAL_CROWDED if s.topology.crowded and s.hosts == 1 else STAR_TOTAL


def receives_first(s: Situation) -> bool:
    """Not where ranks share cores, nor for the short messages of several ranks."""
    small = s.equal and s.ranks > 2 and s.total <= STAR_TOTAL
    return s.gloo and (s.hosts > 1 or not (s.topology.crowded or small))


def star_sum(s: Situation) -> int:
    if s.ranks == 2:
        return STAR_SUM_OF_TWO
    return STAR_SUM_CROWDED if s.topology.crowded and s.hosts == 1 else STAR_SUM


def has_star_exchange(s: Situation) -> bool:
    """Where ranks share cores, a message costs more than it carries."""
    limit = STAR_TOTAL if s.hosts > 1 else STAR_EXCHANGE_CROWDED
    return s.gloo and s.equal and s.ranks > 2 and s.topology.crowded and s.total <= limit


def is_repeated(s: Situation) -> bool:
    """Where processor time decides: ranks share cores, or short blocks go between hosts, where the
    receives of longer ones must be announced first.
    """
    if s.hosts > 1:
        return s.gloo and s.equal and s.piece <= s.ranks * REPEATED_BLOCK
    return s.gloo and s.equal and s.ranks > 2 and s.topology.crowded


def is_linear(s: Situation) -> bool:
    """A root behind a link sends, or receives, every rank's bytes over it."""
    alone = s.hosts == s.ranks
    return s.gloo and (s.ranks == 2 or s.total <= (ROOT_TOTAL if alone else LINEAR_TOTAL))


def one_to_a_host(s: Situation) -> bool:
    """Three hosts or more with one rank each: the backend's ring sends a sum as often as it must."""
    return 2 < s.hosts == s.ranks and s.piece > FLAT_ALONE


def many_to_a_host(s: Situation) -> bool:
    """Several hosts, some with several ranks: flat algorithms send them the same bytes."""
    return s.gloo and 1 < s.hosts < s.ranks


def goes_around(s: Situation) -> bool:
    """A piece from everywhere at once would wait at the link of one host: one_to_a_host, in turns."""
    return s.gloo and 2 < s.hosts == s.ranks and s.piece > RING_PIECE


def is_shared_by_hosts(s: Situation) -> bool:
    """Every rank's piece on every host; with one rank on each, receives are announced first."""
    return s.gloo and s.hosts > 1 and s.total > FLAT_TOTAL


def is_scattered(s: Situation) -> bool:
    """The link of the root would carry a piece once for each other host."""
    return many_to_a_host(s) and s.hosts > 2 and s.piece > SCATTERED_PIECE


def is_summed_by_hosts(s: Situation) -> bool:
    if many_to_a_host(s):
        return s.piece > FLAT_PIECE
    return s.gloo and s.hosts == 2 and s.piece > FLAT_ALONE
