"""Algorithms made of sends and receives: star, linear, chunked.

    star       every rank sends to rank 0, which sends each its part of the result
    linear     one root sends to, or receives from, every rank
    chunked    every rank reduces, or passes on, one chunk of the elements, and nobody all of them

For tensors on the host. ``algorithms`` says where each is used; ``pairwise`` has the exchanges.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch

from allgrad._core.partition import even
from allgrad._wire import deadline
from allgrad._wire.messages import start, wait

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from allgrad._wire.calls import Call
    from allgrad._wire.messages import Transfer
    from allgrad._wire.wait_spec import Alike

__all__ = [
    "CHUNK",
    "IN_FLIGHT",
    "chunked_all_reduce",
    "chunked_broadcast",
    "chunked_reduce",
    "linear_broadcast",
    "linear_reduce",
    "star_all_gather",
    "star_all_reduce",
    "star_all_to_all",
    "star_reduce_scatter",
]

# Where a rank adds what others send, long pieces come in chunks of CHUNK bytes, and as many are
# in flight at once as fit into IN_FLIGHT.
CHUNK, IN_FLIGHT = 2 << 20, 8 << 20
ROOT = 0


# ---- star ------------------------------------------------------------------------------------


def star_all_reduce(call: Call, x: Tensor, scratch: bool = False) -> Tensor:  # noqa: ARG001
    """Sum over ranks, on every rank, added up on the root."""
    if call.rank != ROOT:
        return _exchange_with_root(call, x, x, torch.empty_like(x))
    if call.size == 2:
        # While both ranks send at once, Gloo's thread spins on the connection that the caller
        # uses. One after the other they take half of the processor time, and no longer.
        total = torch.empty_like(x)
        wait(call, x, start(call, (), [(total, 1)]))
        torch.add(x, total, out=total)
    else:
        total = _recv_stacked(call, x, x).sum(0, dtype=x.dtype)
    _send_all(call, x, [total] * call.size)
    return total


def star_all_gather(call: Call, x: Tensor, counts: Sequence[int]) -> Tensor:
    """Every rank's block, in rank order, on every rank."""
    out = x.new_empty((sum(counts), *x.shape[1:]))
    if call.rank != ROOT:
        return _exchange_with_root(call, (out, counts), x, out)
    _recv_all(call, (out, counts), x, out.split(counts))
    _send_all(call, (out, counts), [out] * call.size)
    return out


def star_reduce_scatter(call: Call, x: Tensor, counts: Sequence[int]) -> Tensor:
    """Block ``r`` of the sum over ranks, on rank ``r``."""
    if call.rank != ROOT:
        own = x.new_empty((counts[call.rank], *x.shape[1:]))
        return _exchange_with_root(call, (x, counts), x, own)
    total = _recv_stacked(call, (x, counts), x).sum(0, dtype=x.dtype)
    blocks: Sequence[Tensor] = total.split(counts)
    _send_all(call, (x, counts), blocks)
    return blocks[ROOT].clone()  # a view would keep the whole sum alive


def star_all_to_all(call: Call, x: Tensor, *_: object) -> Tensor:
    """Equal block ``r`` to rank ``r``, transposed on the root."""
    out = torch.empty_like(x)
    if call.rank != ROOT:
        return _exchange_with_root(call, x, x, out)
    blocks = _recv_stacked(call, x, x).view(call.size, call.size, x.numel() // call.size)
    parts = blocks.transpose(0, 1).contiguous().view(call.size, *x.shape).unbind()
    _send_all(call, x, parts)
    return out.copy_(parts[ROOT])


def _exchange_with_root(call: Call, alike: Alike, x: Tensor, out: Tensor) -> Tensor:
    """Send ``x`` to the root, and receive this rank's part of the result into ``out``."""
    wait(call, alike, start(call, [(x, ROOT)], [(out, ROOT)]))
    return out


def _recv_stacked(call: Call, alike: Alike, x: Tensor) -> Tensor:
    """On the root: every rank's piece, stacked."""
    pieces = x.new_empty((call.size, *x.shape))
    _recv_all(call, alike, x, pieces.unbind())
    return pieces


def _recv_all(call: Call, alike: Alike, x: Tensor, into: Sequence[Tensor]) -> None:
    """On the root: receive every rank's piece, its own included."""
    works = start(call, (), [(into[rank], rank) for rank in range(1, call.size)])
    into[ROOT].copy_(x)
    wait(call, alike, works)


def _send_all(call: Call, alike: Alike, parts: Sequence[Tensor]) -> None:
    """On the root: send every rank its part."""
    wait(call, alike, start(call, [(parts[rank], rank) for rank in range(1, call.size)], ()))


# ---- linear ----------------------------------------------------------------------------------


def linear_broadcast(call: Call, x: Tensor, src: int) -> Tensor:
    """What ``src`` holds, sent by it to every rank at once."""
    if call.rank != src:
        out = torch.empty_like(x)
        wait(call, x, start(call, (), [(out, src)]))
        return out
    works = start(call, [(x, rank) for rank in _others(call.size, src)], ())
    out = x.clone()
    wait(call, x, works)
    return out


def linear_reduce(call: Call, x: Tensor, dst: int) -> Tensor:
    """The sum on ``dst``, to which every rank sends; zeros on the others."""
    if call.rank == dst:
        return _add_received(call, x, x, _others(call.size, dst))
    works = start(call, _in_chunks([(x, dst)]), ())
    zeros = torch.zeros_like(x)
    wait(call, x, works)
    return zeros


# ---- chunked ---------------------------------------------------------------------------------


def chunked_broadcast(call: Call, x: Tensor, src: int) -> Tensor:
    """What ``src`` holds: one chunk to each of the others, who send them to one another."""
    others = _others(call.size, src)
    if call.rank == src:
        works = start(call, list(zip(_even_chunks(x, len(others)), others, strict=True)), ())
        out = x.clone()
        wait(call, x, works)
        return out
    return _recv_and_pass_on(call, x, src, others)


def chunked_reduce(call: Call, x: Tensor, dst: int) -> Tensor:
    """The sum on ``dst``: the others add up one chunk each and send it to ``dst``."""
    others = _others(call.size, dst)
    if call.rank == dst:
        out = torch.empty_like(x)
        chunks = _even_chunks(out, len(others))
        wait(call, x, start(call, (), list(zip(chunks, others, strict=True))))
        return out.add_(x)
    own = _reduce_own_block(call, x, dict(zip(others, _even_chunks(x, len(others)), strict=True)))
    works = start(call, [(own, dst)], ())
    zeros = torch.zeros_like(x)
    wait(call, x, works)
    return zeros


def chunked_all_reduce(call: Call, x: Tensor, scratch: bool = False) -> Tensor:
    """The sum on every rank: each rank adds up one chunk and sends that to all others.

    ``scratch`` gives ``x`` away: the result takes its memory.
    """
    out = x if scratch else torch.empty_like(x)
    sums = _even_chunks(out, call.size)
    own = _reduce_own_block(call, x, dict(enumerate(_even_chunks(x, call.size))), sums[call.rank])
    after, before = _around(range(call.size), call.rank)
    sends, recvs = [(own, rank) for rank in after], [(sums[rank], rank) for rank in before]
    wait(call, x, start(call, sends, recvs))
    return out


# ---- what they share -------------------------------------------------------------------------


def _recv_and_pass_on(call: Call, x: Tensor, src: int, ranks: Sequence[int]) -> Tensor:
    """What ``src`` holds: a chunk from it, sent to the others of these ranks, and theirs."""
    out = torch.empty_like(x)
    chunks = dict(zip(ranks, _even_chunks(out, len(ranks)), strict=True))
    own = chunks.pop(call.rank)
    works = start(call, (), [(chunk, rank) for rank, chunk in chunks.items()])
    wait(call, x, start(call, (), [(own, src)]))
    wait(call, x, start(call, [(own, rank) for rank in chunks], ()))
    wait(call, x, works)
    return out


def _reduce_own_block(
    call: Call, alike: Alike, blocks: Mapping[int, Tensor], out: Tensor | None = None
) -> Tensor:
    """Send each of these ranks its block, and add up what they send of this rank's own."""
    after, before = _around(tuple(blocks), call.rank)
    sends = [(blocks[rank], rank) for rank in after]
    return _add_received(call, alike, blocks[call.rank], before, sends, out)


def _add_received(  # noqa: PLR0917
    call: Call,
    alike: Alike,
    x: Tensor,
    sources: Sequence[int],
    sends: Sequence[Transfer] = (),
    out: Tensor | None = None,
) -> Tensor:
    """Add to ``x`` what ranks send, in this order, while ``sends`` are under way.

    The sum is in ``out``, which may be ``x``, or in new memory.
    """
    out = torch.empty_like(x) if out is None else out
    terms, sums = _chunks(x), _chunks(out)
    turns = [(chunk, source) for chunk in range(len(terms)) for source in sources if x.numel()]
    if not turns:
        wait(call, alike, start(call, _in_chunks(sends), ()))
        return out.copy_(x)
    ahead = min(len(turns), max(1, IN_FLIGHT // terms[0].nbytes))
    buffers = terms[0].new_empty((ahead, *terms[0].shape)).unbind()
    recvs = []
    for turn, (chunk, source) in enumerate(turns):
        buffer = buffers[turn % ahead]
        recvs.append((buffer[: len(terms[chunk])] if chunk else buffer, source))
    works = start(call, _in_chunks(sends) if sends else (), recvs[:ahead])
    receiving, sending = list(works[:ahead]), works[ahead:]
    # A rank that listens for others pays for every wait: it waits for all at once.
    at_once = 1 if deadline.STATE.no_deadline else ahead
    for turn, (chunk, source) in enumerate(turns):
        if turn % at_once == 0:
            wait(call, alike, receiving[turn : turn + at_once])
        so_far = terms[chunk] if source == sources[0] else sums[chunk]
        torch.add(so_far, recvs[turn][0], out=sums[chunk])
        if turn + ahead < len(turns):
            receiving += start(call, (), [recvs[turn + ahead]])
    wait(call, alike, sending)
    return out


def _chunks(x: Tensor) -> Sequence[Tensor]:
    if x.nbytes <= CHUNK:
        return (x,)
    chunks: Sequence[Tensor] = x.view(-1).split(CHUNK // x.element_size())
    return chunks


def _in_chunks(sends: Sequence[Transfer]) -> Sequence[Transfer]:
    """First chunks to every rank first."""
    if all(x.nbytes <= CHUNK for x, _ in sends):
        return sends
    by_rank = [[(chunk, to) for chunk in _chunks(x)] for x, to in sends]
    return [transfer for turn in zip_longest(*by_rank) for transfer in turn if transfer is not None]


def _even_chunks(x: Tensor, parts: int) -> Sequence[Tensor]:
    chunks: Sequence[Tensor] = x.view(-1).split(even(x.numel(), parts))
    return chunks


@lru_cache
def _others(ranks: int, rank: int) -> tuple[int, ...]:
    return tuple(other for other in range(ranks) if other != rank)


@lru_cache
def _around(ranks: Sequence[int], rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """All other ranks: those after this one first, and those before it first."""
    at = ranks.index(rank)
    after = (*ranks[at + 1 :], *ranks[:at])
    return after, after[::-1]
