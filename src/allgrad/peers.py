"""Messages from rank to rank: sent and received at once, swapped, added as they come, or by a hub.

    rank 0   the hub   hears a, b, c           answers what it makes of them
    rank 1   asks with b                       gets its part
    rank 2   asks with c                       gets its part

On the host only, and only where ``plans`` says so.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from allgrad import waiting
from allgrad.errors import RankRaised

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeAlias

    from torch import Tensor

    from allgrad.groups import Group

    # From or into what, and who is at the other end.
    Transfer: TypeAlias = tuple[Tensor, int]

__all__ = [
    "AHEAD",
    "HUB",
    "KNOWN_TO_BACKENDS",
    "add_from",
    "answer",
    "arrive",
    "ask",
    "hear",
    "in_order",
    "moved",
    "start",
    "swap",
]

KNOWN_TO_BACKENDS = frozenset(
    {
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.int8, torch.uint8, torch.int32, torch.int64),
    }
)
# Pieces on their way at once, where a rank adds what others send: as many as fit into this.
AHEAD = 8 << 20
HUB = 0
_TAG = 0xA116  # not one of the messages that the caller may be sending meanwhile


def ask(group: Group, x: Tensor, out: Tensor) -> Tensor:
    """Send ``x`` to the hub, and take into ``out`` what it makes of everybody's."""
    arrive(group, start(group, [(x, HUB)], [(out, HUB)]))
    return out


def hear(group: Group, x: Tensor, into: Sequence[Tensor]) -> None:
    """On the hub: take what every rank sends, its own included."""
    works = start(group, (), [(into[rank], rank) for rank in range(1, group.size)])
    into[HUB].copy_(x)
    arrive(group, works)


def answer(group: Group, out: Sequence[Tensor]) -> None:
    """On the hub: send every rank its part."""
    arrive(group, start(group, [(out[rank], rank) for rank in range(1, group.size)], ()))


def swap(group: Group, x: Tensor) -> Tensor:
    """Send ``x`` to everybody, and add everybody's in the order of ranks: the same bits on each."""
    pieces, sent, into = [], [], []
    for rank in range(group.size):
        piece = x
        if rank != group.rank:
            piece = torch.empty_like(x)
            sent.append((x, rank))
            into.append((piece, rank))
        pieces.append(piece)
    arrive(group, start(group, sent, into))
    total = into[0][0]
    torch.add(pieces[0], pieces[1], out=total)  # one of the two is the total itself
    for piece in pieces[2:]:
        total += piece
    return total


def in_order(group: Group) -> tuple[list[int], list[int]]:
    """All other ranks: the next ones first, and the ones before first."""
    ahead = [(group.rank + k) % group.size for k in range(1, group.size)]
    return ahead, ahead[::-1]


def add_from(group: Group, x: Tensor, sources: Sequence[int], sent: Sequence[Transfer]) -> Tensor:
    """Add to ``x`` what peers send, in this order; send something to a peer in each turn, if given.

    The next pieces are on their way meanwhile, if they are small.
    """
    ahead = min(len(sources), max(1, AHEAD // max(1, x.nbytes)))
    incoming = x.new_empty((ahead, *x.shape)).unbind()
    total = x.clone()
    under_way: list[Sequence[Any]] = []
    for turn in range(len(sources) + ahead):
        if turn >= ahead:
            arrive(group, under_way[turn - ahead])
            total += incoming[turn % ahead]
        if turn < len(sources):
            into = [(incoming[turn % ahead], sources[turn])]
            under_way.append(start(group, sent[turn : turn + 1], into))
    return total


def start(group: Group, sent: Sequence[Transfer], into: Sequence[Transfer]) -> Sequence[Any]:
    """Start to send and to receive; nothing is sent of what has no elements.

    What is sent goes first, to be on its way; what comes is waited for first, and then the other
    has mostly gone.
    """
    calls = group.process_group
    coming: list[Any] = []
    going: list[Any] = []
    try:
        if not waiting.usual(group):
            waiting.introduce(group)
            waiting.limit(group)
        for x, peer in sent:
            if x.numel():
                going.append(calls.send([moved(x)], peer, _TAG))
        for x, peer in into:
            if x.numel():
                coming.append(calls.recv([moved(x)], peer, _TAG))
    except RuntimeError as error:
        waiting.cut_off(group)
        raise waiting.explain(group, error, 0.0) from error
    return coming + going


def arrive(group: Group, works: Sequence[Any]) -> None:
    """Wait for what was started."""
    began = time.monotonic()
    try:
        if waiting.patient():
            for work in works:
                work.wait()
        else:
            waiting.wait_for_peers(group, works)
    except (RuntimeError, RankRaised) as error:
        waiting.cut_off(group)
        if isinstance(error, RankRaised):
            raise
        raise waiting.explain(group, error, time.monotonic() - began) from error


def moved(x: Tensor) -> Tensor:
    """What backends can move of ``x``.

    Moving needs no arithmetic: as bytes every dtype travels on every backend, bit for bit
    (test_every_dtype_travels).
    """
    if x.dtype in KNOWN_TO_BACKENDS:
        return x
    # A single element counts as contiguous whatever its stride.
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)
