"""What an algorithm costs, by formula: steps, messages, bytes, work in a rank's own memory.

``W`` ranks; ``piece`` and ``total`` as in a ``Situation``. ``algorithms.TABLE`` names a formula for
each entry; ``link_model`` turns it into time; the tests compare it with what travels.
"""

from __future__ import annotations

from math import ceil, log2
from typing import TYPE_CHECKING, NamedTuple

from allgrad._wire.across_hosts import carriers_of_sum
from allgrad._wire.groups import Backend

if TYPE_CHECKING:
    from allgrad._wire.situation import Situation

__all__ = ["Cost"]


class Cost(NamedTuple):
    """What the busiest rank does.

    steps: messages that follow one another.
    nbytes: bytes that it sends and receives.
    messages: how many messages that are.
    average: what a rank does on average, as a part of that; 1 where all ranks do the same.
    local: bytes that it reads and writes in its own memory, to copy and to add.
    memory: bytes that it allocates, the result included.
    calls: calls of the backend; none where we send and receive ourselves.
    between: bytes that go over the link of the busiest host, where hosts are several: in its busier
        direction, or in both where one follows the other.
    """

    steps: float
    nbytes: float
    messages: float = 2
    average: float = 1
    local: float = 0
    memory: float = 0
    calls: int = 0
    between: float = 0

    def then(self, other: Cost) -> Cost:
        """One after the other."""
        work = self.messages + other.messages
        shared = self.messages * self.average + other.messages * other.average
        return Cost(
            self.steps + other.steps,
            self.nbytes + other.nbytes,
            work,
            shared / work if work else 1,
            self.local + other.local,
            max(self.memory, other.memory),
            self.calls + other.calls,
            self.between + other.between,
        )


def _local(s: Situation) -> float:
    """Ranks on a host."""
    return s.ranks / s.hosts


def _away(s: Situation) -> float:
    """Ranks on other hosts than one rank's."""
    return s.ranks - _local(s)


# ---- star, linear: one root ------------------------------------------------------------------


def _star(s: Situation, sent: float, received: float, local: float, memory: float) -> Cost:
    """Each rank sends and receives so many bytes; the root exchanges them with every other."""
    others = s.ranks - 1
    moved = sent + received
    return Cost(2, others * moved, 2 * others, 2 / s.ranks, local, memory, 0, _away(s) * moved)


def star_all_reduce(s: Situation) -> Cost:
    return _star(s, s.piece, s.piece, (s.ranks + 2) * s.piece, (s.ranks + 1) * s.piece)


def star_all_gather(s: Situation) -> Cost:
    return _star(s, s.total / s.ranks, s.total, 2 * s.piece, s.total)


def star_reduce_scatter(s: Situation) -> Cost:
    local = (s.ranks + 3) * s.total
    return _star(s, s.total, s.total / s.ranks, local, (s.ranks + 1) * s.total + s.piece)


def star_all_to_all(s: Situation) -> Cost:
    return _star(s, s.piece, s.piece, 2 * (s.total + s.piece), 2 * s.total + s.piece)


def _linear(s: Situation, local: float, memory: float) -> Cost:
    others = s.ranks - 1
    between = _away(s) * s.piece
    return Cost(1, others * s.piece, others, 2 / s.ranks, local, memory, 0, between)


def linear_broadcast(s: Situation) -> Cost:
    return _linear(s, 2 * s.piece, s.piece)


def linear_reduce(s: Situation) -> Cost:
    return _linear(s, 3 * (s.ranks - 1) * s.piece, s.ranks * s.piece)


# ---- pairwise, chunked: every rank alike -----------------------------------------------------


def _exchange(s: Situation, block: float, local: float, memory: float, *, calls: int = 0) -> Cost:
    """A block from every rank to every other."""
    others = s.ranks - 1
    between = _local(s) * _away(s) * block
    return Cost(1, 2 * others * block, 2 * others, 1, local, memory, calls, between)


def pairwise_all_gather(s: Situation) -> Cost:
    return _exchange(s, s.piece, 2 * s.piece, s.total)


def copies_all_gather(s: Situation) -> Cost:
    return _exchange(s, s.piece, s.total + s.piece, 2 * s.total, calls=1)


def pairwise_reduce_scatter(s: Situation) -> Cost:
    return _exchange(s, s.piece, 3 * (s.ranks - 1) * s.piece, s.total)


def stacked_reduce_scatter(s: Situation) -> Cost:
    return _exchange(s, s.piece, (s.ranks + 3) * s.piece, s.total + s.piece)


def exchange_reduce_scatter(s: Situation) -> Cost:
    return _exchange(s, s.piece, (s.ranks + 3) * s.piece, s.total + s.piece, calls=1)


def pairwise_all_to_all(s: Situation) -> Cost:
    return _exchange(s, s.piece / s.ranks, 2 * s.piece / s.ranks, s.piece)


def backend_all_to_all(s: Situation) -> Cost:
    return _exchange(s, s.piece / s.ranks, 2 * s.piece / s.ranks, s.piece, calls=1)


def shift(s: Situation) -> Cost:
    """An all_to_all in which every rank sends all it has to one other."""
    return Cost(1, 2 * s.piece, 2, 1, 0, s.piece, 0, s.piece if s.hosts > 1 else 0)


def chunked_all_reduce(s: Situation) -> Cost:
    chunk = s.piece / s.ranks
    adding = _exchange(s, chunk, 3 * (s.ranks - 1) * chunk, s.piece + (s.ranks - 1) * chunk)
    return adding.then(_exchange(s, chunk, 0, 0))


def chunked_broadcast(s: Situation) -> Cost:
    """The root sends a chunk to each of the others, who exchange them."""
    others = s.ranks - 1
    moved = s.piece * (1 + (s.ranks - 2) / others)
    between = _away(s) * s.piece
    steps, messages = min(2, others), 1 + 2 * (others - 1)
    return Cost(steps, moved, messages, 1, 0, s.piece, 0, between)


def chunked_reduce(s: Situation) -> Cost:
    return chunked_broadcast(s)._replace(local=3 * s.piece, memory=3 * s.piece)


def gather_reduce(s: Situation) -> Cost:
    """An exchange in which all but the root receive nothing; Gloo sends that too."""
    local = (s.ranks + 1) * s.piece
    rooted = _linear(s, local, (s.ranks + 1) * s.piece)
    return rooted._replace(messages=2 * (s.ranks - 1), average=1, calls=1)


# ---- algorithms of a backend -----------------------------------------------------------------


def _ring(s: Situation, moved: float, rounds: int, local: float, memory: float) -> Cost:
    """Every rank sends to the next and receives from the one before, all the time."""
    steps = rounds * (s.ranks - 1)
    between = moved if s.hosts > 1 else 0
    return Cost(steps, 2 * moved, 2 * steps, 1, local, memory, 1, between)


def backend_all_reduce(s: Situation) -> Cost:
    moved = 2 * s.piece * (1 - 1 / s.ranks)
    return _ring(s, moved, 2, 5 * s.piece, 2 * s.piece)


def backend_all_gather(s: Situation) -> Cost:
    """Gloo gathers into memory of its own and copies that twice."""
    moved = s.total * (1 - 1 / s.ranks)
    if s.backend is Backend.GLOO:
        return _ring(s, moved, 1, 4 * s.total, 3 * s.total)
    return _ring(s, moved, 1, 2 * s.piece, s.total)


def ring_all_gather(s: Situation) -> Cost:
    moved = (s.ranks - 1) * s.piece
    return _ring(s, moved, 1, 2 * s.piece, s.total)._replace(calls=0)


def list_all_gather(s: Situation) -> Cost:
    """NCCL makes a broadcast for every rank; Gloo gathers, and copies into the list."""
    if s.backend is Backend.NCCL:
        between = s.total if s.hosts > 1 else 0
        return Cost(s.ranks, 2 * s.total, 2 * s.ranks, calls=1, memory=s.total, between=between)
    return backend_all_gather(s)._replace(local=2 * s.total, memory=2 * s.total)


def broadcasts_all_gather(s: Situation) -> Cost:
    """A broadcast for every rank, in the tree of the backend."""
    one = backend_broadcast(s)
    moved = 2 * s.total * (1 - 1 / s.ranks)
    return one._replace(
        nbytes=moved, messages=2 * (s.ranks - 1), average=1, local=2 * s.piece,
        memory=s.total, calls=s.ranks, between=s.ranks * one.between,
    )  # fmt: skip


def backend_reduce_scatter(s: Situation) -> Cost:
    """Gloo reduces the whole on every rank and keeps a block."""
    if s.backend is Backend.GLOO:
        return _ring(s, 2 * s.total * (1 - 1 / s.ranks), 2, 5 * s.total, 2 * s.total)
    return _ring(s, s.total * (1 - 1 / s.ranks), 1, 3 * s.total, s.piece)


def list_reduce_scatter(s: Situation) -> Cost:
    """A reduce for every rank."""
    steps = s.ranks * (s.ranks - 1) if s.backend is Backend.GLOO else s.ranks
    between = s.total if s.hosts > 1 else 0
    return Cost(steps, 2 * s.total, 2 * steps, 1, 3 * s.total, 2 * s.total, s.ranks, between)


def backend_broadcast(s: Situation) -> Cost:
    """A tree over Gloo, a ring elsewhere."""
    if s.backend is not Backend.GLOO:
        return _ring(s, s.piece, 1, 2 * s.piece, s.piece)
    depth = ceil(log2(s.ranks))
    average = 2 * (s.ranks - 1) / (s.ranks * depth)
    between = ceil(log2(s.hosts)) * s.piece
    return Cost(depth, depth * s.piece, depth, average, 2 * s.piece, s.piece, 1, between)


def backend_reduce(s: Situation) -> Cost:
    """Gloo reduces a chunk on each rank, and gathers the chunks on the root."""
    once = _ring(s, s.piece, 1, 5 * s.piece, 2 * s.piece)
    if s.backend is not Backend.GLOO:
        return once
    return once._replace(steps=s.ranks, messages=3 * (s.ranks - 1))


# ---- several hosts ---------------------------------------------------------------------------


def across_hosts_all_gather(s: Situation) -> Cost:
    """Once to a carrier on each other host, who passes it on to its own."""
    local, hosts = _local(s), s.hosts
    messages = 2 * (hosts - 1) + 2 * (local - 1) * hosts
    between = local * (hosts - 1) * s.piece
    moved = 2 * (s.ranks - 1) * s.piece
    return Cost(2 if hosts > 1 else 1, moved, messages, 1, 2 * s.piece, s.total, 0, between)


def across_hosts_reduce_scatter(s: Situation) -> Cost:
    adding = 3 * (s.ranks - 1) * s.piece
    return across_hosts_all_gather(s)._replace(local=adding, memory=(s.hosts + 2) * s.piece)


def across_hosts_all_reduce(s: Situation) -> Cost:
    """A chunk for each carrier: added up in the host, among hosts, and given to all of it."""
    local, hosts = _local(s), s.hosts
    carriers = carriers_of_sum(s.piece, s.topology)
    chunk = s.piece / carriers
    among = min(hosts - 1, 2)  # two hosts exchange the whole in one step; more add up a part each
    messages = 2 * (local + carriers - 2) + 2 * among * (hosts - 1)
    crossing = 2 * s.piece if hosts == 2 else 4 * s.piece * (1 - 1 / hosts)
    moved = 2 * (local + carriers - 2) * chunk + crossing / carriers
    all_messages = carriers * (4 * (local - 1) + 2 * among * (hosts - 1))  # seen from both ends
    average = all_messages / local / messages
    adding = 3 * (local - 1 + among / 2) * chunk
    memory = s.piece + local * chunk
    return Cost(2 + among, moved, messages, average, adding, memory, 0, crossing / 2)


def across_hosts_broadcast(s: Situation) -> Cost:
    """The busiest is the root, or a rank that passes on its chunk of what a host gets."""
    local, hosts = s.ranks // s.hosts, s.hosts
    root = s.piece * (hosts if local > 1 else hosts - 1)
    others = local if hosts > 1 else local - 1
    moved = max(root, s.piece * (2 - 1 / others))
    between = (hosts - 1) * s.piece
    return Cost(2, moved, 2 * others, 1, 2 * s.piece, s.piece, 0, between)


def across_hosts_reduce(s: Situation) -> Cost:
    return across_hosts_broadcast(s)._replace(
        local=(s.hosts + 2) * s.piece, memory=(s.hosts + 1) * s.piece
    )


def scattered_broadcast(s: Situation) -> Cost:
    """A chunk to each rank, then an all_gather of the chunks."""
    chunk = -(-s.piece // s.ranks)
    between, others = _away(s) * chunk, s.ranks - 1
    scatter = Cost(1, others * chunk, others, 2 / s.ranks, 0, 0, 0, between)
    return scatter.then(across_hosts_all_gather(s._replace(piece=chunk, total=s.piece)))


def scattered_reduce(s: Situation) -> Cost:
    chunk = -(-s.piece // s.ranks)
    summed = across_hosts_reduce_scatter(s._replace(piece=chunk, total=s.piece))
    between, others = _away(s) * chunk, s.ranks - 1
    gather = Cost(1, others * chunk, others, 2 / s.ranks, 2 * chunk, s.piece, 0, between)
    return summed.then(gather)
