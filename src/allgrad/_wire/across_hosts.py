"""Algorithms for ranks on several hosts: bytes cross a link between hosts as often as they must.

    host a   rank 0 -.    .- rank 2   host b         Every rank exchanges with its counterparts
             rank 1 -|----|- rank 3                  on the other hosts, and with the ranks of its
                    link                             own host, which share what has come.

The flat algorithms of ``point_to_point`` send the same bytes to every rank behind a link. On one
host, or with one rank on each, these send what those do.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from allgrad._core.partition import even
from allgrad._wire.hosts import find_topology
from allgrad._wire.point_to_point import (
    _add_received,
    _around,
    _even_chunks,
    _in_chunks,
    _reduce_own_block,
    _start,
    _wait,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from allgrad._wire.calls import Call
    from allgrad._wire.topology import Topology

__all__ = ["all_gather", "all_reduce", "broadcast", "reduce", "reduce_scatter"]


def all_gather(call: Call, x: Tensor, counts: Sequence[int]) -> Tensor:
    """Every rank's block, sent once to each other host, whose carrier of it passes it on.

    host a   rank 0   a  ->  1, 2          host b   rank 2   c, then a  ->  3
    """
    topology = find_topology(call)
    out = x.new_empty((sum(counts), *x.shape[1:]))
    blocks = out.split(counts)
    after, before = _around(_local_ranks(call), call.rank)
    works = [*_start(call, [(x, to) for to in (*_carriers(topology, call.rank), *after)], ())]
    coming = {
        rank: _start(call, (), [(blocks[rank], rank)]) for rank in _carried(topology, call.rank)
    }
    inside = [(blocks[r], peer) for peer in before for r in (peer, *_carried(topology, peer))]
    works += _start(call, (), inside)
    blocks[call.rank].copy_(x)
    for rank, arrival in coming.items():
        _wait(call, out, arrival)
        works += _start(call, [(blocks[rank], peer) for peer in after], ())
    _wait(call, out, works)
    return out


def reduce_scatter(call: Call, x: Tensor, counts: Sequence[int]) -> Tensor:
    """Block ``r`` of the sum on rank ``r``: each host adds up its ranks' blocks before it sends one.

    The mirror image of ``all_gather``.
    """
    blocks = x.split(counts)
    topology = find_topology(call)
    after, before = _around(_local_ranks(call), call.rank)
    # What leaves the host goes first: links between hosts are slow.
    turns = {rank: (*_carried(topology, rank), rank) for rank in _local_ranks(call)}
    sums: list[Tensor] = []
    works: list[Any] = []
    for turn in range(max(map(len, turns.values()))):
        sends = [(blocks[turns[to][turn]], to) for to in after if turn < len(turns[to])]
        if turn >= len(turns[call.rank]):
            works += _start(call, _in_chunks(sends), ())
            continue
        target = turns[call.rank][turn]
        sums.append(_add_received(call, x, blocks[target], before, sends))
        if target != call.rank:
            works += _start(call, [(sums[-1], target)], ())
    out = sums[-1]
    carriers = _carriers(topology, call.rank)
    received = out.new_empty((len(carriers), *out.shape)).unbind()
    _wait(call, x, _start(call, (), list(zip(received, carriers, strict=True))))
    for term in received:
        out += term
    _wait(call, x, works)
    return out


def all_reduce(call: Call, x: Tensor, scratch: bool = False) -> Tensor:
    """The sum on every rank: a chunk for each local rank, added up in the host, then among hosts.

    ``scratch`` gives ``x`` away: the result takes its memory.
    """
    out = x if scratch else torch.empty_like(x)
    local = _local_ranks(call)
    hosts = find_topology(call).hosts
    carriers = min(len(ranks) for ranks in hosts)
    lengths = even(x.numel(), carriers) + (0,) * (len(local) - carriers)
    sums = dict(zip(local, out.view(-1).split(lengths), strict=True))
    terms = dict(zip(local, x.view(-1).split(lengths), strict=True))
    own = _reduce_own_block(call, x, terms, sums[call.rank])
    if own.numel() and len(hosts) > 1:
        at = local.index(call.rank)
        _all_reduce_among(call, x, own, tuple(ranks[at] for ranks in hosts))
    after, before = _around(local, call.rank)
    sends, recvs = [(own, rank) for rank in after], [(sums[rank], rank) for rank in before]
    _wait(call, x, _start(call, sends, recvs))
    return out


def broadcast(call: Call, x: Tensor, src: int) -> Tensor:
    """What ``src`` holds: on each host one chunk to every rank, which sends it to the others."""
    out = x.clone() if call.rank == src else torch.empty_like(x)
    if call.rank == src:
        groups = _without(find_topology(call), src)
        sends = [
            transfer
            for ranks in groups
            for transfer in zip(_even_chunks(x, len(ranks)), ranks, strict=True)
        ]
        _wait(call, x, _start(call, sends, ()))
        return out
    receivers = tuple(rank for rank in _local_ranks(call) if rank != src)
    chunks = dict(zip(receivers, _even_chunks(out, len(receivers)), strict=True))
    own = chunks.pop(call.rank)
    works = _start(call, (), [(chunk, rank) for rank, chunk in chunks.items()])
    _wait(call, x, _start(call, (), [(own, src)]))
    _wait(call, x, _start(call, [(own, rank) for rank in chunks], ()))
    _wait(call, x, works)
    return out


def reduce(call: Call, x: Tensor, dst: int) -> Tensor:
    """The sum on ``dst``, to which each host sends one; zeros on the others."""
    if call.rank != dst:
        owners = tuple(rank for rank in _local_ranks(call) if rank != dst)
        blocks = dict(zip(owners, _even_chunks(x, len(owners)), strict=True))
        works = _start(call, [(_reduce_own_block(call, x, blocks), dst)], ())
        zeros = torch.zeros_like(x)
        _wait(call, x, works)
        return zeros
    groups = _without(find_topology(call), dst)
    sums = x.new_empty((len(groups), *x.shape)).unbind()
    recvs = [
        transfer
        for ranks, total in zip(groups, sums, strict=True)
        for transfer in zip(_even_chunks(total, len(ranks)), ranks, strict=True)
    ]
    _wait(call, x, _start(call, (), recvs))
    out = x.clone()
    for total in sums:
        out += total
    return out


# ---- what they share -------------------------------------------------------------------------


def _all_reduce_among(call: Call, alike: Tensor, x: Tensor, ranks: tuple[int, ...]) -> None:
    """Replace ``x`` by its sum over these ranks: each adds up one chunk and sends it to the others.

    Two ranks exchange the whole, in one step, and add it in the same order.
    """
    if len(ranks) == 2:
        other, peer = torch.empty_like(x), ranks[call.rank == ranks[0]]
        _wait(call, alike, _start(call, [(x, peer)], [(other, peer)]))
        torch.add(*((x, other) if call.rank == ranks[0] else (other, x)), out=x)
        return
    chunks = dict(zip(ranks, _even_chunks(x, len(ranks)), strict=True))
    own = _reduce_own_block(call, alike, chunks, chunks[call.rank])
    after, before = _around(ranks, call.rank)
    sends, recvs = [(own, rank) for rank in after], [(chunks[rank], rank) for rank in before]
    _wait(call, alike, _start(call, sends, recvs))


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
