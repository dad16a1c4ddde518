"""Collectives made of single messages, without autograd: the fastest ways found, written plainly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

__all__ = [
    "exchanged_by_hub",
    "exchanged_in_pairs",
    "passed_back",
    "passed_on",
    "sent_back",
    "sent_out",
    "summed_by_hub",
    "summed_in_shares",
]


def sent_out(x: Tensor, rank: int) -> Tensor:
    """From rank 0 to everybody, all at once."""
    if rank:
        out = torch.empty_like(x)
        dist.recv(out, 0)
        return out
    works = [dist.isend(x, peer) for peer in range(1, dist.get_world_size())]
    out = x.clone()
    _wait(works)
    return out


def sent_back(g: Tensor, rank: int) -> Tensor:
    """From everybody to rank 0, which adds."""
    if rank:
        dist.send(g, 0)
        return torch.zeros_like(g)
    total, incoming = g.clone(), [torch.empty_like(g) for _ in range(dist.get_world_size() - 1)]
    works = [dist.irecv(piece, peer) for peer, piece in enumerate(incoming, 1)]
    for work, piece in zip(works, incoming, strict=True):
        _wait([work])
        total += piece
    return total


def passed_on(x: Tensor, rank: int) -> Tensor:
    """From rank 0 a share to each of the others, who send theirs to one another."""
    others = range(1, dist.get_world_size())
    out = torch.empty_like(x)
    shares = (out if rank else x).view(-1).tensor_split(len(others))
    if rank:
        peers = [peer for peer in others if peer != rank]
        works = [dist.irecv(shares[peer - 1], peer) for peer in peers]
        dist.recv(shares[rank - 1], 0)
        works += [dist.isend(shares[rank - 1], peer) for peer in peers]
    else:
        works = [dist.isend(shares[peer - 1], peer) for peer in others]
        out.copy_(x)
    _wait(works)
    return out


def passed_back(g: Tensor, rank: int) -> Tensor:
    """The others add up a share each, and send it to rank 0, which adds its own."""
    others = range(1, dist.get_world_size())
    if not rank:
        out = torch.empty_like(g)
        shares = out.view(-1).tensor_split(len(others))
        _wait([dist.irecv(shares[peer - 1], peer) for peer in others])
        return out.add_(g)
    shares = g.view(-1).tensor_split(len(others))
    peers = [peer for peer in others if peer != rank]
    own, incoming = shares[rank - 1], [torch.empty_like(shares[rank - 1]) for _ in peers]
    works = [dist.isend(shares[peer - 1], peer) for peer in peers]
    _wait(works + [dist.irecv(piece, peer) for piece, peer in zip(incoming, peers, strict=True)])
    dist.send(sum(incoming, own), 0)
    return torch.zeros_like(g)


def exchanged_in_pairs(x: Tensor) -> Tensor:
    """Block ``r`` to rank ``r``, all at once."""
    world, out = dist.get_world_size(), torch.empty_like(x)
    _pairs(x.chunk(world), out.chunk(world))
    return out


def summed_in_shares(x: Tensor) -> Tensor:
    """Each rank adds up a share, and sends it to everybody."""
    world, out = dist.get_world_size(), torch.empty_like(x)
    shares = x.view(-1).tensor_split(world)
    incoming = x.new_empty(world, *shares[dist.get_rank()].shape)
    _pairs(shares, incoming.unbind())
    _pairs([incoming.sum(0)] * world, out.view(-1).tensor_split(world))
    return out


def summed_by_hub(x: Tensor, rank: int) -> Tensor:
    """Everything to rank 0, which sends everyone the sum."""
    return _through_hub(x, lambda pieces: pieces.sum(0).expand_as(pieces), rank)


def exchanged_by_hub(x: Tensor, rank: int) -> Tensor:
    """Everything to rank 0, which sends everyone their blocks."""

    def by_receiver(pieces: Tensor) -> Tensor:
        blocks = pieces.view(len(pieces), len(pieces), -1)
        return blocks.transpose(0, 1).contiguous().view_as(pieces)

    return _through_hub(x, by_receiver, rank)


def _pairs(pieces: Sequence[Tensor], blocks: Sequence[Tensor]) -> None:
    """Piece ``r`` to rank ``r``, and into block ``r`` what that sends."""
    rank, world = dist.get_rank(), dist.get_world_size()
    works = [dist.isend(pieces[(rank + k) % world], (rank + k) % world) for k in range(1, world)]
    works += [dist.irecv(blocks[rank - k], (rank - k) % world) for k in range(1, world)]
    blocks[rank].copy_(pieces[rank])
    _wait(works)


def _through_hub(x: Tensor, answers: Callable[[Tensor], Tensor], rank: int) -> Tensor:
    """What everyone sends to rank 0, in rows, and what that answers to each."""
    out = torch.empty_like(x)
    if rank:
        _wait([dist.irecv(out, 0), dist.isend(x, 0)])
        return out
    pieces = x.new_empty(dist.get_world_size(), *x.shape)
    works = [dist.irecv(pieces[peer], peer) for peer in range(1, len(pieces))]
    pieces[0].copy_(x)
    _wait(works)
    made = answers(pieces)
    works = [dist.isend(made[peer], peer) for peer in range(1, len(pieces))]
    out.copy_(made[0])
    _wait(works)
    return out


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()
