"""Collectives made of sends and receives, without autograd: the fastest algorithms found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

__all__ = [
    "chunked_all_reduce",
    "chunked_broadcast",
    "chunked_reduce",
    "linear_broadcast",
    "linear_reduce",
    "pairwise_all_to_all",
    "star_all_reduce",
    "star_all_to_all",
]


def linear_broadcast(x: Tensor, rank: int) -> Tensor:
    """Rank 0 sends to every other rank, all sends at once."""
    if rank:
        out = torch.empty_like(x)
        dist.recv(out, 0)
        return out
    works = [dist.isend(x, peer) for peer in range(1, dist.get_world_size())]
    out = x.clone()
    _wait(works)
    return out


def linear_reduce(g: Tensor, rank: int) -> Tensor:
    """Every rank sends to rank 0, which adds."""
    if rank:
        dist.send(g, 0)
        return torch.zeros_like(g)
    total, incoming = g.clone(), [torch.empty_like(g) for _ in range(dist.get_world_size() - 1)]
    works = [dist.irecv(piece, peer) for peer, piece in enumerate(incoming, 1)]
    for work, piece in zip(works, incoming, strict=True):
        _wait([work])
        total += piece
    return total


def chunked_broadcast(x: Tensor, rank: int) -> Tensor:
    """Rank 0 sends one chunk to each other rank; those send their chunks to one another."""
    others = range(1, dist.get_world_size())
    out = torch.empty_like(x)
    chunks = (out if rank else x).view(-1).tensor_split(len(others))
    if rank:
        peers = [peer for peer in others if peer != rank]
        works = [dist.irecv(chunks[peer - 1], peer) for peer in peers]
        dist.recv(chunks[rank - 1], 0)
        works += [dist.isend(chunks[rank - 1], peer) for peer in peers]
    else:
        works = [dist.isend(chunks[peer - 1], peer) for peer in others]
        out.copy_(x)
    _wait(works)
    return out


def chunked_reduce(g: Tensor, rank: int) -> Tensor:
    """Each other rank sums one chunk and sends it to rank 0, which adds its own values."""
    others = range(1, dist.get_world_size())
    if not rank:
        out = torch.empty_like(g)
        chunks = out.view(-1).tensor_split(len(others))
        _wait([dist.irecv(chunks[peer - 1], peer) for peer in others])
        return out.add_(g)
    chunks = g.view(-1).tensor_split(len(others))
    peers = [peer for peer in others if peer != rank]
    own, incoming = chunks[rank - 1], [torch.empty_like(chunks[rank - 1]) for _ in peers]
    works = [dist.isend(chunks[peer - 1], peer) for peer in peers]
    _wait(works + [dist.irecv(piece, peer) for piece, peer in zip(incoming, peers, strict=True)])
    dist.send(sum(incoming, own), 0)
    return torch.zeros_like(g)


def pairwise_all_to_all(x: Tensor) -> Tensor:
    """Send block ``r`` to rank ``r``, all at once."""
    world, out = dist.get_world_size(), torch.empty_like(x)
    _pairwise_exchange(x.chunk(world), out.chunk(world))
    return out


def chunked_all_reduce(x: Tensor) -> Tensor:
    """Each rank sums one chunk, and sends it to every other rank."""
    world, out = dist.get_world_size(), torch.empty_like(x)
    chunks = x.view(-1).tensor_split(world)
    incoming = x.new_empty(world, *chunks[dist.get_rank()].shape)
    _pairwise_exchange(chunks, incoming.unbind())
    _pairwise_exchange([incoming.sum(0)] * world, out.view(-1).tensor_split(world))
    return out


def star_all_reduce(x: Tensor, rank: int) -> Tensor:
    """Every rank sends to rank 0, which sends the sum back."""
    return _exchange_with_root(x, lambda pieces: pieces.sum(0).expand_as(pieces), rank)


def star_all_to_all(x: Tensor, rank: int) -> Tensor:
    """Every rank sends to rank 0, which sends each rank its blocks."""

    def by_receiver(pieces: Tensor) -> Tensor:
        blocks = pieces.view(len(pieces), len(pieces), -1)
        return blocks.transpose(0, 1).contiguous().view_as(pieces)

    return _exchange_with_root(x, by_receiver, rank)


def _pairwise_exchange(pieces: Sequence[Tensor], blocks: Sequence[Tensor]) -> None:
    """Send piece ``r`` to rank ``r``, and receive from rank ``r`` into block ``r``."""
    rank, world = dist.get_rank(), dist.get_world_size()
    works = [dist.isend(pieces[(rank + k) % world], (rank + k) % world) for k in range(1, world)]
    works += [dist.irecv(blocks[rank - k], (rank - k) % world) for k in range(1, world)]
    blocks[rank].copy_(pieces[rank])
    _wait(works)


def _exchange_with_root(x: Tensor, combine: Callable[[Tensor], Tensor], rank: int) -> Tensor:
    """Send ``x`` to rank 0; receive this rank's row of ``combine`` of all inputs, stacked."""
    out = torch.empty_like(x)
    if rank:
        _wait([dist.irecv(out, 0), dist.isend(x, 0)])
        return out
    pieces = x.new_empty(dist.get_world_size(), *x.shape)
    works = [dist.irecv(pieces[peer], peer) for peer in range(1, len(pieces))]
    pieces[0].copy_(x)
    _wait(works)
    made = combine(pieces)
    works = [dist.isend(made[peer], peer) for peer in range(1, len(pieces))]
    out.copy_(made[0])
    _wait(works)
    return out


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()
