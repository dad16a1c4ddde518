"""Messages from rank to rank: traded, added as they come, through a hub, or in shares.

    rank 0   the hub   hears a, b, c           answers what it makes of them
    rank 1   asks with b                       gets its part
    rank 2   asks with c                       gets its part

In shares, every rank adds up, or passes on, one block of the elements, and nobody all of them.

On the host only, and only where ``plans`` says so.
"""

from __future__ import annotations

import time
from functools import lru_cache
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch

from allgrad._core.partition import even
from allgrad._wire import deadline as waiting
from allgrad.errors import RankRaised

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import TypeAlias

    from torch import Tensor

    from allgrad._wire.groups import Group

    # From or into what, and who is at the other end.
    Transfer: TypeAlias = tuple[Tensor, int]

__all__ = [
    "AHEAD",
    "CHUNK",
    "HUB",
    "add_own",
    "add_up",
    "answer",
    "ask",
    "bring",
    "bring_shares",
    "hear",
    "meet",
    "send_out",
    "share_out",
    "take_turns",
    "trade",
]

# Where a rank adds what others send, long pieces come in chunks, and as many are on their way at
# once as fit into AHEAD.
CHUNK, AHEAD = 2 << 20, 8 << 20
HUB = 0
_TAG = 0xA116  # not one of the messages that the caller may be sending meanwhile


def ask(group: Group, x: Tensor, out: Tensor) -> Tensor:
    """Send ``x`` to the hub, and take into ``out`` what it makes of everybody's."""
    _arrive(group, _start(group, [(x, HUB)], [(out, HUB)]))
    return out


def hear(group: Group, x: Tensor, into: Sequence[Tensor]) -> None:
    """On the hub: take what every rank sends, its own included."""
    works = _start(group, (), [(into[rank], rank) for rank in range(1, group.size)])
    into[HUB].copy_(x)
    _arrive(group, works)


def answer(group: Group, out: Sequence[Tensor]) -> None:
    """On the hub: send every rank its part."""
    _arrive(group, _start(group, [(out[rank], rank) for rank in range(1, group.size)], ()))


def meet(group: Group, x: Tensor) -> Tensor:
    """The sum of two ranks, on both: one of them adds, and sends it back.

    While both send at once Gloo's thread spins: it waits for a connection that the caller is using
    by asking again and again. In turns they take half of the processor's time, and no longer.
    """
    out = torch.empty_like(x)
    if group.rank != HUB:
        return ask(group, x, out)
    _arrive(group, _start(group, (), [(out, 1)]))
    torch.add(x, out, out=out)
    answer(group, (x, out))
    return out


def trade(group: Group, pieces: Sequence[Tensor], blocks: Sequence[Tensor]) -> None:
    """Send every rank its piece, and take a block from each; the own one is copied."""
    ahead, behind = _around(range(group.size), group.rank)
    sent, into = [], []
    for to, source in zip(ahead, behind, strict=True):
        sent.append((pieces[to], to))
        into.append((blocks[source], source))
    works = _start(group, sent, into)
    blocks[group.rank].copy_(pieces[group.rank])
    _arrive(group, works)


def take_turns(group: Group, pieces: Sequence[Tensor], blocks: Sequence[Tensor]) -> None:
    """The same in turns: a rank sends to those below it, and to those above once it has theirs."""
    below, above = range(group.rank), range(group.rank + 1, group.size)
    from_above = _start(group, (), [(blocks[rank], rank) for rank in above])
    from_below = _start(group, (), [(blocks[rank], rank) for rank in below])
    going = _start(group, [(pieces[rank], rank) for rank in below], ())
    blocks[group.rank].copy_(pieces[group.rank])
    _arrive(group, from_above)
    going = [*going, *_start(group, [(pieces[rank], rank) for rank in above], ())]
    _arrive(group, [*from_below, *going])


def send_out(group: Group, x: Tensor, src: int) -> Tensor:
    """What ``src`` holds, sent to everybody at once."""
    if group.rank != src:
        out = torch.empty_like(x)
        _arrive(group, _start(group, (), [(out, src)]))
        return out
    works = _start(group, [(x, rank) for rank in _others(group.size, src)], ())
    out = x.clone()
    _arrive(group, works)
    return out


def share_out(group: Group, x: Tensor, src: int) -> Tensor:
    """The same in shares: one to each of the others, who send them to one another."""
    others = _others(group.size, src)
    if group.rank == src:
        works = _start(group, list(zip(_shares(x, len(others)), others, strict=True)), ())
        out = x.clone()
        _arrive(group, works)
        return out
    out = torch.empty_like(x)
    shares = dict(zip(others, _shares(out, len(others)), strict=True))
    own = shares.pop(group.rank)
    works = _start(group, (), [(share, rank) for rank, share in shares.items()])
    _arrive(group, _start(group, (), [(own, src)]))
    _arrive(group, _start(group, [(own, rank) for rank in shares], ()))
    _arrive(group, works)
    return out


def bring(group: Group, x: Tensor, dst: int) -> Tensor:
    """The sum on ``dst``, to which everybody sends; zeros on the others."""
    if group.rank == dst:
        return _add_from(group, x, _others(group.size, dst))
    works = _start(group, _in_chunks([(x, dst)]), ())
    zeros = torch.zeros_like(x)
    _arrive(group, works)
    return zeros


def bring_shares(group: Group, x: Tensor, dst: int) -> Tensor:
    """The same in shares: the others add up one each, and send that to ``dst``, which adds its own."""
    others = _others(group.size, dst)
    if group.rank == dst:
        out = torch.empty_like(x)
        _arrive(group, _start(group, (), list(zip(_shares(out, len(others)), others, strict=True))))
        return out.add_(x)
    own = add_own(group, dict(zip(others, _shares(x, len(others)), strict=True)))
    works = _start(group, [(own, dst)], ())
    zeros = torch.zeros_like(x)
    _arrive(group, works)
    return zeros


def add_up(group: Group, x: Tensor, out: Tensor) -> Tensor:
    """The sum on every rank, in ``out``, which may be ``x``: each adds up a share and sends that."""
    sums = _shares(out, group.size)
    own = add_own(group, dict(enumerate(_shares(x, group.size))), sums[group.rank])
    ahead, behind = _around(range(group.size), group.rank)
    sent, into = [(own, rank) for rank in ahead], [(sums[rank], rank) for rank in behind]
    _arrive(group, _start(group, sent, into))
    return out


def add_own(group: Group, blocks: Mapping[int, Tensor], out: Tensor | None = None) -> Tensor:
    """Send each of these ranks its block, and add up what they send of this rank's own."""
    ahead, behind = _around(tuple(blocks), group.rank)
    sent = [(blocks[rank], rank) for rank in ahead]
    return _add_from(group, blocks[group.rank], behind, sent, out)


def _add_from(
    group: Group,
    x: Tensor,
    sources: Sequence[int],
    sent: Sequence[Transfer] = (),
    out: Tensor | None = None,
) -> Tensor:
    """Add to ``x`` what ranks send, in this order, while they are sent what is for them.

    The sum is in ``out``, which may be ``x``, or in new memory.
    """
    out = torch.empty_like(x) if out is None else out
    terms, sums = _chunks(x), _chunks(out)
    turns = [(chunk, source) for chunk in range(len(terms)) for source in sources if x.numel()]
    if not turns:
        _arrive(group, _start(group, _in_chunks(sent), ()))
        return out.copy_(x)
    ahead = min(len(turns), max(1, AHEAD // terms[0].nbytes))
    places = terms[0].new_empty((ahead, *terms[0].shape)).unbind()
    into = []
    for turn, (chunk, source) in enumerate(turns):
        place = places[turn % ahead]
        into.append((place[: len(terms[chunk])] if chunk else place, source))
    works = _start(group, _in_chunks(sent) if sent else (), into[:ahead])
    coming, going = list(works[:ahead]), works[ahead:]
    at_once = 1 if waiting.patient() else ahead  # whoever listens meanwhile pays for every wait
    for turn, (chunk, source) in enumerate(turns):
        if turn % at_once == 0:
            _arrive(group, coming[turn : turn + at_once])
        so_far = terms[chunk] if source == sources[0] else sums[chunk]
        torch.add(so_far, into[turn][0], out=sums[chunk])
        if turn + ahead < len(turns):
            coming += _start(group, (), [into[turn + ahead]])
    _arrive(group, going)
    return out


def _chunks(x: Tensor) -> Sequence[Tensor]:
    if x.nbytes <= CHUNK:
        return (x,)
    chunks: Sequence[Tensor] = x.view(-1).split(CHUNK // x.element_size())
    return chunks


def _in_chunks(sent: Sequence[Transfer]) -> Sequence[Transfer]:
    """To everybody the first chunks first."""
    if all(x.nbytes <= CHUNK for x, _ in sent):
        return sent
    by_rank = [[(chunk, to) for chunk in _chunks(x)] for x, to in sent]
    return [transfer for turn in zip_longest(*by_rank) for transfer in turn if transfer is not None]


def _shares(x: Tensor, ranks: int) -> Sequence[Tensor]:
    shares: Sequence[Tensor] = x.view(-1).split(even(x.numel(), ranks))
    return shares


@lru_cache
def _others(ranks: int, rank: int) -> tuple[int, ...]:
    return tuple(other for other in range(ranks) if other != rank)


@lru_cache
def _around(ranks: Sequence[int], rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """All others of these: the next ones first, and the ones before first."""
    at = ranks.index(rank)
    ahead = (*ranks[at + 1 :], *ranks[:at])
    return ahead, ahead[::-1]


def _start(group: Group, sent: Sequence[Transfer], into: Sequence[Transfer]) -> Sequence[Any]:
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
                going.append(calls.send([x], peer, _TAG))
        for x, peer in into:
            if x.numel():
                coming.append(calls.recv([x], peer, _TAG))
    except RuntimeError as error:
        waiting.cut_off(group)
        raise waiting.explain(group, error, 0.0) from error
    return coming + going


def _arrive(group: Group, works: Sequence[Any]) -> None:
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
