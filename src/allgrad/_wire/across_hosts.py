"""Algorithms for ranks on several hosts: bytes cross a link between hosts as often as they must.

    host a   rank 0 -.    .- rank 2   host b         Every rank exchanges with its counterparts
             rank 1 -|----|- rank 3                  on the other hosts, and with the ranks of its
                    link                             own host, which share what has come.

The flat algorithms of ``point_to_point`` send the same bytes to every rank behind a link. On one
host, or with one rank on each, these send what those do.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from allgrad._core.partition import even
from allgrad._wire.hosts import find_topology
from allgrad._wire.messages import exchange, start, wait
from allgrad._wire.point_to_point import (
    _add_received,
    _around,
    _even_chunks,
    _in_chunks,
    _recv_and_pass_on,
    _reduce_own_block,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor

    from allgrad._wire.calls import Call
    from allgrad._wire.topology import Topology

__all__ = [
    "all_gather",
    "all_reduce",
    "broadcast",
    "carriers_of_sum",
    "reduce",
    "reduce_scatter",
    "ring_all_gather",
    "scattered_broadcast",
    "scattered_reduce",
]

# Bytes of a sum for each rank of a host that carries some of it. A rank without a core of its own carries
# more: messages cost it more than they save.
CARRIED, CARRIED_CROWDED = 64 << 10, 256 << 10
# Bytes of a sum that go through its stages together: with a core for each rank an eighth, within these.
SHORT_SEGMENT, SEGMENT = 128 << 10, 4 << 20
_DONE = object()


def all_gather(call: Call, x: Tensor, counts: Sequence[int]) -> Tensor:
    """Every rank's block, sent once to each other host, whose carrier of it passes it on.

    host a   rank 0   a  ->  1, 2          host b   rank 2   c, then a  ->  3
    """
    topology = find_topology(call)
    out = x.new_empty((sum(counts), *x.shape[1:]))
    blocks = out.split(counts)
    after, before = _around(_local_ranks(call), call.rank)
    coming = {
        rank: start(call, (), [(blocks[rank], rank)]) for rank in _carried(topology, call.rank)
    }
    works = [*start(call, [(x, to) for to in (*_carriers(topology, call.rank), *after)], ())]
    inside = [(blocks[r], peer) for peer in before for r in (peer, *_carried(topology, peer))]
    works += start(call, (), inside)
    blocks[call.rank].copy_(x)
    for rank, arrival in coming.items():
        wait(call, out, arrival)
        works += start(call, [(blocks[rank], peer) for peer in after], ())
    wait(call, out, works)
    return out


def ring_all_gather(call: Call, x: Tensor, counts: Sequence[int]) -> Tensor:
    """Every rank's block, from each rank to the next, which passes it on.

    rank 0   a  ->  1          rank 1   b, then a  ->  2          rank 2   c, then b  ->  0
    """
    out = x.new_empty((sum(counts), *x.shape[1:]))
    blocks, ring = out.split(counts), range(call.size)
    before, after = ring[call.rank - 1], ring[(call.rank + 1) % call.size]
    sources = [ring[call.rank - turn] for turn in range(1, call.size)]
    coming = [start(call, (), [(blocks[source], before)]) for source in sources]
    works = [*start(call, [(x, after)], ())]
    blocks[call.rank].copy_(x)
    for source, arrival in zip(sources, coming, strict=True):
        wait(call, out, arrival)
        if source != after:
            works += start(call, [(blocks[source], after)], ())
    wait(call, out, works)
    return out


def reduce_scatter(call: Call, x: Tensor, counts: Sequence[int]) -> Tensor:
    """Block ``r`` of the sum on rank ``r``: each host adds up its ranks' blocks before it sends one.

    The mirror image of ``all_gather``.
    """
    blocks = x.split(counts)
    topology = find_topology(call)
    after, before = _around(_local_ranks(call), call.rank)
    carriers = _carriers(topology, call.rank)
    received = x.new_empty((len(carriers), *blocks[call.rank].shape)).unbind()
    coming = start(call, (), list(zip(received, carriers, strict=True)))
    # What leaves the host goes first: links between hosts are slow.
    turns = {rank: (*_carried(topology, rank), rank) for rank in _local_ranks(call)}
    sums: list[Tensor] = []
    works: list[Any] = []
    for turn in range(max(map(len, turns.values()))):
        sends = [(blocks[turns[to][turn]], to) for to in after if turn < len(turns[to])]
        if turn >= len(turns[call.rank]):
            works += start(call, _in_chunks(sends), ())
            continue
        target = turns[call.rank][turn]
        sums.append(_add_received(call, x, blocks[target], before, sends))
        if target != call.rank:
            works += start(call, [(sums[-1], target)], ())
    out = sums[-1]
    wait(call, x, coming)
    for term in received:
        out += term
    wait(call, x, works)
    return out


def all_reduce(call: Call, x: Tensor, scratch: bool = False) -> Tensor:
    """The sum on every rank: a chunk for each local rank, added up in the host, then among hosts.

    Long tensors go in segments: while one crosses the link, hosts add up the next.
    ``scratch`` gives ``x`` away: the result takes its memory.
    """
    out = x if scratch else torch.empty_like(x)
    if not x.numel():
        return out
    length = _segment_length(x, find_topology(call))
    segments = [
        _reduce_segment(call, x, term, total)
        for term, total in zip(x.view(-1).split(length), out.view(-1).split(length), strict=True)
    ]
    _run_in_pipeline(segments)
    return out


def broadcast(call: Call, x: Tensor, src: int) -> Tensor:
    """What ``src`` holds: on each host one chunk to every rank, which sends it to the others."""
    if call.rank != src:
        receivers = tuple(rank for rank in _local_ranks(call) if rank != src)
        return _recv_and_pass_on(call, x, src, receivers)
    sends = [
        transfer
        for ranks in _without(find_topology(call), src)
        for transfer in zip(_even_chunks(x, len(ranks)), ranks, strict=True)
    ]
    works = start(call, sends, ())
    out = x.clone()
    wait(call, x, works)
    return out


def reduce(call: Call, x: Tensor, dst: int) -> Tensor:
    """The sum on ``dst``, to which each host sends one; zeros on the others."""
    if call.rank != dst:
        owners = tuple(rank for rank in _local_ranks(call) if rank != dst)
        blocks = dict(zip(owners, _even_chunks(x, len(owners)), strict=True))
        works = start(call, [(_reduce_own_block(call, x, blocks), dst)], ())
        zeros = torch.zeros_like(x)
        wait(call, x, works)
        return zeros
    groups = _without(find_topology(call), dst)
    sums = x.new_empty((len(groups), *x.shape)).unbind()
    recvs = [
        transfer
        for ranks, total in zip(groups, sums, strict=True)
        for transfer in zip(_even_chunks(total, len(ranks)), ranks, strict=True)
    ]
    wait(call, x, start(call, (), recvs))
    out = x.clone()
    for total in sums:
        out += total
    return out


def scattered_broadcast(call: Call, x: Tensor, src: int) -> Tensor:
    """What ``src`` holds: a chunk to each rank, then an ``all_gather`` of the chunks.

    With three hosts or more: otherwise the link of src carries everything once for each of the others.
    """
    counts = even(x.numel(), call.size)
    chunks = x.view(-1).split(counts)
    if call.rank != src:
        own = x.new_empty(counts[call.rank])
        wait(call, x, start(call, (), [(own, src)]))
        return all_gather(call, own, counts).view(x.shape)
    sends = [(chunk, rank) for rank, chunk in enumerate(chunks) if rank != src]
    works = start(call, sends, ())
    out = all_gather(call, chunks[src], counts).view(x.shape)
    wait(call, x, works)
    return out


def scattered_reduce(call: Call, x: Tensor, dst: int) -> Tensor:
    """The sum on ``dst``: a ``reduce_scatter``, whose chunks go to dst; zeros on the others.

    The mirror image of ``scattered_broadcast``.
    """
    counts = even(x.numel(), call.size)
    own = reduce_scatter(call, x.view(-1), counts)
    if call.rank != dst:
        works = start(call, [(own, dst)], ())
        zeros = torch.zeros_like(x)
        wait(call, x, works)
        return zeros
    out = torch.empty_like(x)
    chunks = out.view(-1).split(counts)
    works = start(call, (), [(chunk, rank) for rank, chunk in enumerate(chunks) if rank != dst])
    chunks[dst].copy_(own)
    wait(call, x, works)
    return out


# ---- what they share -------------------------------------------------------------------------


def _run_in_pipeline(segments: Iterable[Iterator[None]]) -> None:
    """Take segments from ``yield`` to ``yield``: while one waits for messages, the next sends its own."""
    waiting = deque(segments)
    under_way: list[Iterator[None]] = []
    while waiting or under_way:
        if waiting:
            under_way.insert(0, waiting.popleft())
        under_way = [segment for segment in under_way if next(segment, _DONE) is not _DONE]


def _reduce_segment(call: Call, alike: Tensor, x: Tensor, out: Tensor) -> Iterator[None]:
    """Sum one segment on every rank; each ``yield`` is where messages are under way."""
    topology, local = find_topology(call), _local_ranks(call)
    hosts, carriers = topology.hosts, carriers_of_sum(alike.nbytes, topology)
    lengths = even(x.numel(), carriers) + (0,) * (len(local) - carriers)
    terms = dict(zip(local, x.split(lengths), strict=True))
    sums = dict(zip(local, out.split(lengths), strict=True))
    after, before = _around(local, call.rank)
    term, own = terms[call.rank], sums[call.rank]
    received = term.new_empty((len(before), *term.shape)).unbind()
    sends = [(terms[rank], rank) for rank in after]
    works = start(call, sends, list(zip(received, before, strict=True)))
    yield
    wait(call, alike, works)
    for number, other in enumerate(received):
        torch.add(own if number else term, other, out=own)
    if not received:
        own.copy_(term)
    at = local.index(call.rank)
    counterparts = tuple(ranks[at % len(ranks)] for ranks in hosts)
    among = _exchange_sums if len(hosts) == 2 else _all_reduce_in_chunks
    yield from among(call, alike, own, counterparts)
    sends, recvs = [(own, rank) for rank in after], [(sums[rank], rank) for rank in before]
    works = start(call, sends, recvs)
    yield
    wait(call, alike, works)


def _exchange_sums(call: Call, alike: Tensor, x: Tensor, ranks: tuple[int, ...]) -> Iterator[None]:
    """Replace ``x`` by its sum over two ranks, which both add, in the same order."""
    other, peer = torch.empty_like(x), ranks[call.rank == ranks[0]]
    works = exchange(call, [(x, peer)], [(other, peer)])
    yield
    wait(call, alike, works)
    torch.add(*((x, other) if call.rank == ranks[0] else (other, x)), out=x)


def _all_reduce_in_chunks(
    call: Call, alike: Tensor, x: Tensor, ranks: tuple[int, ...]
) -> Iterator[None]:
    """Replace ``x`` by its sum over these ranks: each adds up one chunk and sends it to the others."""
    chunks = dict(zip(ranks, _even_chunks(x, len(ranks)), strict=True))
    own = chunks[call.rank]
    after, before = _around(ranks, call.rank)
    received = own.new_empty((len(before), *own.shape)).unbind()
    sends, recvs = (
        [(chunks[rank], rank) for rank in after],
        list(zip(received, before, strict=True)),
    )
    works = exchange(call, sends, recvs)
    yield
    wait(call, alike, works)
    for other in received:
        own += other
    sends, recvs = [(own, rank) for rank in after], [(chunks[rank], rank) for rank in before]
    works = exchange(call, sends, recvs)
    yield
    wait(call, alike, works)


def carriers_of_sum(nbytes: int, topology: Topology) -> int:
    """How many ranks of each host carry a chunk of a sum over the links."""
    each = CARRIED_CROWDED if topology.crowded else CARRIED
    return max(1, min((nbytes // each, *map(len, topology.hosts))))


def _segment_length(x: Tensor, topology: Topology) -> int:
    """How many elements of a tensor go through the stages together."""
    nbytes = SEGMENT if topology.crowded else min(SEGMENT, max(SHORT_SEGMENT, x.nbytes // 8))
    return nbytes // x.element_size()


def _local_ranks(call: Call) -> tuple[int, ...]:
    """The ranks on this rank's host, itself included."""
    topology = find_topology(call)
    return topology.hosts[topology.host_of[call.rank]]


@lru_cache(maxsize=4096)
def _carriers(topology: Topology, rank: int) -> tuple[int, ...]:
    """On each other host, the rank that exchanges with this one for its host."""
    host = topology.host_of[rank]
    at = topology.hosts[host].index(rank)
    others = [*topology.hosts[host + 1 :], *topology.hosts[:host]]
    return tuple(ranks[at % len(ranks)] for ranks in others)


@lru_cache(maxsize=4096)
def _carried(topology: Topology, rank: int) -> tuple[int, ...]:
    """The ranks on other hosts that have this one as a carrier."""
    host = topology.host_of[rank]
    others = (other for ranks in topology.hosts for other in ranks)
    return tuple(
        other
        for other in others
        if topology.host_of[other] != host and rank in _carriers(topology, other)
    )


@lru_cache(maxsize=4096)
def _without(topology: Topology, root: int) -> tuple[tuple[int, ...], ...]:
    """The ranks of every host but the root; the root's own host, which is near, last."""
    host = topology.host_of[root]
    hosts = (*topology.hosts[host + 1 :], *topology.hosts[:host], topology.hosts[host])
    found = (tuple(rank for rank in ranks if rank != root) for ranks in hosts)
    return tuple(ranks for ranks in found if ranks)
