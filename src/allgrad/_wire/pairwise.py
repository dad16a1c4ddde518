"""Exchanges made of sends and receives: every rank with every other, all at once.

For tensors on the host. ``algorithms`` says where each is used.

In an exchange each rank knows only its own counts. Its messages therefore carry their block's shape
and the number of the exchange in their tags, and a block without rows travels as one byte: ranks
whose counts do not fit never exchange values, and wait until the watchdog ends it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NamedTuple

import torch

from allgrad._wire.messages import exchange, start, start_exchange, start_unsized, wait
from allgrad._wire.observers import STATE
from allgrad._wire.point_to_point import _around, _reduce_own_block

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from torch import Tensor

    from allgrad._wire.calls import Call
    from allgrad._wire.messages import ByRank
    from allgrad._wire.wait_spec import Alike, Peers

__all__ = [
    "Parts",
    "all_gather",
    "all_to_all",
    "all_to_all_receives_first",
    "all_to_all_unsized",
    "reduce_scatter",
    "stacked_reduce_scatter",
]


class Parts(NamedTuple):
    """The rows of a tensor in the order in which they stand: lengths of parts, each one's rank at
    the other end, and its number among the parts between the two ranks.
    """

    lengths: tuple[int, ...]
    ranks: tuple[int, ...]
    numbers: tuple[int, ...]


def all_gather(call: Call, x: Tensor, counts: Sequence[int]) -> Tensor:
    """Every rank's block, in rank order, sent to every rank at once."""
    out = x.new_empty((sum(counts), *x.shape[1:]))
    _exchange(call, (out, counts), [x] * call.size, out.split(counts))
    return out


def all_to_all(  # noqa: PLR0917
    call: Call,
    x: Tensor,
    send: Sequence[int],
    receive: Sequence[int],
    equal: bool = False,
    peers: Peers = None,
    parts: tuple[Parts, Parts] | None = None,
    receives_first: bool = False,
) -> Tensor:
    """Block ``r`` of ``x`` to rank ``r``, all at once.

    With ``parts`` each part of ``x`` goes to where the result has it.
    """
    group, mine = call.group, call.rank
    group.exchanges += 1
    if equal:
        out = torch.empty_like(x)
        by_rank = call.size, x.numel() // call.size
        pieces: ByRank = x.view(by_rank).unbind()
        blocks: ByRank = out.view(by_rank).unbind()
        row: tuple[torch.dtype, Sequence[int]] = x.dtype, ()
        alike: Alike = x
    else:
        shape = x.shape[1:]
        out = x.new_empty((sum(receive), *shape))
        # A rank whose own counts are met goes on. It still tells those who wait what it sent.
        about = x.dtype, shape, send, receive, peers
        group.exchanged.append((group.calls, call.name, call.nest, *about))
        if parts is not None:
            post = exchange if receives_first else start
            _exchange_parts(call, (x, send, receive, None), out, parts, post)
            return out
        to, sources = (None, None) if peers is None else peers
        pieces, blocks = _blocks(x, send, to, mine), _blocks(out, receive, sources, mine)
        row, alike = (x.dtype, shape), (x, send, receive, peers)
    if peers is None:
        peers = _around(range(call.size), mine)
    else:
        peers = [to for to in peers[0] if to != mine], [one for one in peers[1] if one != mine]
    works = start_exchange(call, row, pieces, blocks, peers, group.exchanges, receives_first)
    blocks[mine].copy_(pieces[mine])
    wait(call, alike, works)
    return out


def _blocks(x: Tensor, counts: Sequence[int], ranks: Sequence[int] | None, own: int) -> ByRank:
    """The blocks of ``x`` by rank; where only a few are sent or received, these and the own one."""
    if ranks is None or len(ranks) + 1 >= len(counts):
        blocks: Sequence[Tensor] = x.split_with_sizes(counts)
        return blocks
    return {rank: x.narrow(0, sum(counts[:rank]), counts[rank]) for rank in (own, *ranks)}


def all_to_all_receives_first(  # noqa: PLR0917
    call: Call,
    x: Tensor,
    send: Sequence[int],
    receive: Sequence[int],
    equal: bool = False,
    peers: Peers = None,
    parts: tuple[Parts, Parts] | None = None,
) -> Tensor:
    """The same with every receive announced before anything is sent."""
    return all_to_all(call, x, send, receive, equal, peers, parts, receives_first=True)


def all_to_all_unsized(
    call: Call, x: Tensor, sends: Sequence[Tensor], recvs: Sequence[Tensor]
) -> Tensor:
    """``sends[r]`` to rank ``r``, and what it sends into ``recvs[r]``, which may be longer.

    No rank sends more bytes than any receives into. ``x`` is all that is sent. While calls are
    recorded, the result has as many bytes as came: messages begin with their length.
    """
    call.group.exchanges += 1
    after, before = _around(range(call.size), call.rank)
    works = start_unsized(
        call,
        [(sends[rank], rank) for rank in after],
        [(recvs[rank], rank) for rank in before],
        call.group.exchanges,
    )
    own = sends[call.rank]
    recvs[call.rank][: own.shape[0]].copy_(own)
    wait(call, None, works)
    if STATE.recorder is None:
        return x
    lengths = [int.from_bytes(bytes(block[:8].tolist()), sys.byteorder) for block in recvs]
    return x.new_empty(sum(lengths))


def reduce_scatter(call: Call, x: Tensor, counts: Sequence[int]) -> Tensor:
    """Block ``r`` of ``x`` to rank ``r``, which adds blocks as they come."""
    return _reduce_own_block(call, (x, counts), dict(enumerate(x.split(counts))))


def stacked_reduce_scatter(call: Call, x: Tensor, counts: Sequence[int]) -> Tensor:
    """The same for short blocks, added when all are there."""
    rows = x.new_empty((call.size, counts[call.rank], *x.shape[1:]))
    _exchange(call, (x, counts), x.split(counts), rows.unbind())
    return rows.sum(0, dtype=x.dtype)


def _exchange(call: Call, alike: Alike, pieces: Sequence[Tensor], blocks: Sequence[Tensor]) -> None:
    """Send each rank its piece, and receive a block from each; the own one is copied."""
    after, before = _around(range(call.size), call.rank)
    sends = [(pieces[to], to) for to in after]
    works = start(call, sends, [(blocks[source], source) for source in before])
    blocks[call.rank].copy_(pieces[call.rank])
    wait(call, alike, works)


_NEXT_PART = 1 << 40  # far more than there are exchanges


def _exchange_parts(
    call: Call,
    alike: tuple[Tensor, Sequence[int], Sequence[int], Peers],
    out: Tensor,
    parts: tuple[Parts, Parts],
    post: Callable[..., Sequence[Any]],
) -> None:
    """Send every part by itself, and receive it in its place; the own ones are copied."""
    ends = []
    for x, (lengths, ranks, numbers) in zip((alike[0], out), parts, strict=True):
        ends.append(dict(zip(zip(numbers, ranks, strict=True), x.split(lengths), strict=True)))
    sends, recvs = ends
    works: list[Any] = []
    after, before = _around(range(call.size), call.rank)
    for part in range(max(max(parts[0].numbers, default=0), max(parts[1].numbers, default=0)) + 1):
        works += post(
            call,
            [(sends[part, to], to) for to in after if (part, to) in sends],
            [(recvs[part, source], source) for source in before if (part, source) in recvs],
            call.group.exchanges + part * _NEXT_PART,
        )
        if (part, call.rank) in sends:
            recvs[part, call.rank].copy_(sends[part, call.rank])
    wait(call, alike, works)
