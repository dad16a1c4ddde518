"""How bytes are moved: every call of the wire, in the ways that ``plans`` chooses from.

Here is real memory among several ranks. What the calls mean is said in ``wire``.
"""

from __future__ import annotations

import time
from functools import lru_cache, partial
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from allgrad import plans, waiting
from allgrad.errors import RankRaised
from allgrad.ragged import even

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    from torch import Tensor

    from allgrad.groups import Group

    # From or into what, and who is at the other end.
    Transfer: TypeAlias = tuple[Tensor, int]

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "overwrite",
    "reduce",
    "reduce_scatter",
    "start_overwriting",
]

_KNOWN_TO_BACKENDS = frozenset(
    {
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.int8, torch.uint8, torch.int32, torch.int64),
    }
)
_SUMMED_BY_BACKENDS = _KNOWN_TO_BACKENDS | {torch.complex64, torch.complex128}
# Pieces on their way at once, where a rank adds what others send: as many as fit into this.
_AHEAD = 8 << 20
_HUB = 0
_TAG = 0xA116  # not one of the messages that the caller may be sending meanwhile
_NO_COUNTS: list[int] = []


def _options(kind: Any) -> tuple[Any, Any]:
    """Options of a call that is waited for at once, and of one that is waited for later."""
    both = kind(), kind()
    for later, options in enumerate(both):
        options.asyncOp = bool(later)
    return both


# The calls that small messages take go to the process group itself: on the way through
# torch.distributed's functions they would spend half of their time.
_SUMS, _EXCHANGES = _options(dist.AllreduceOptions), _options(dist.AllToAllOptions)


@lru_cache(maxsize=1024)
def _broadcasts(src: int) -> tuple[Any, Any]:
    both = _options(dist.BroadcastOptions)
    for options in both:
        options.rootRank = src
    return both


# Renamed in torch 2.13, where the old names warn.
_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def all_reduce(group: Group, x: Tensor, scratch: bool = False) -> Tensor:
    way = plans.all_reduce(group.backend(x.device), group.size, x.nbytes, on_host=x.is_cpu)
    if x.dtype not in _SUMMED_BY_BACKENDS:
        counts = even(x.numel(), group.size)
        own = reduce_scatter(group, x.view(-1), counts)
        return all_gather(group, own, counts).view(x.shape)
    if way == "hub":
        if group.rank != _HUB:
            return _ask(group, x, torch.empty_like(x))
        pieces = x.new_empty((group.size, *x.shape))
        _hear(group, x, pieces.unbind())
        total = pieces.sum(0, dtype=x.dtype)
        _answer(group, [total] * group.size)
        return total
    out = x if scratch else x.clone()
    summed = [torch.view_as_real(out) if x.is_complex() else out]
    _call(group, "allreduce", _SUMS, summed)
    return out


def broadcast(group: Group, x: Tensor, src: int) -> Tensor:
    here, backend = group.rank == src, group.backend(x.device)
    way = plans.broadcast(backend, group.size, x.nbytes, on_host=x.is_cpu)
    if way == "backend":
        return overwrite(group, x.clone() if here else torch.empty_like(x), src)
    if here:
        works = _start(group, [(x, rank) for rank in range(group.size) if rank != src], ())
        out = x.clone()
    else:
        out = torch.empty_like(x)
        works = _start(group, (), [(out, src)])
    _arrive(group, works)
    return out


def overwrite(group: Group, x: Tensor, src: int) -> Tensor:
    _call(group, "broadcast", _broadcasts(src), [_moved(x)])
    return x


def start_overwriting(group: Group, x: Tensor, src: int) -> Callable[[], None]:
    moved, options = [_moved(x)], _broadcasts(src)[True]
    works = _begin(group, lambda: [group.process_group.broadcast(moved, options)])
    return lambda: _end(group, works)


def reduce(group: Group, x: Tensor, dst: int) -> Tensor:
    way = plans.reduce(group.backend(x.device), on_host=x.is_cpu)
    here = group.rank == dst
    if way == "backend" and x.dtype in _SUMMED_BY_BACKENDS:
        out = x.clone()
        call = partial(dist.reduce, out, group_dst=dst, group=group.process_group)
        _run(group, lambda later: call(async_op=later))
        return out if here else torch.zeros_like(x)
    if way == "sends":
        if here:
            return _add_from(group, x, [rank for rank in range(group.size) if rank != dst], ())
        works = _start(group, [(x, dst)], ())
        out = torch.zeros_like(x)
        _arrive(group, works)
        return out
    n = x.numel()
    send = [n if rank == dst else 0 for rank in range(group.size)]
    rows = all_to_all(group, x.view(-1), send, [n if here else 0] * group.size)
    if not here:
        return torch.zeros_like(x)
    return rows.view(group.size, *x.shape).sum(0, dtype=x.dtype)


def all_to_all(
    group: Group, x: Tensor, send: Sequence[int], receive: Sequence[int], equal: bool = False
) -> Tensor:
    if equal:
        return _exchange_equal(group, x)
    out = x.new_empty(_rows(sum(receive), x))
    into, sent = out, x
    if x.dtype not in _KNOWN_TO_BACKENDS:
        into, sent = _moved(out), _moved(x)
        width = _row_elements(x) * x.element_size()
        send, receive = [n * width for n in send], [n * width for n in receive]
    _call(group, "alltoall_base", _EXCHANGES, into, sent, receive, send)
    return out


def _exchange_equal(group: Group, x: Tensor) -> Tensor:
    way = plans.all_to_all(group.backend(x.device), group.size, x.nbytes, on_host=x.is_cpu)
    out = torch.empty_like(x)
    if way == "backend":
        # Without counts, which would take longer to hand over than the call takes.
        _call(group, "alltoall_base", _EXCHANGES, _moved(out), _moved(x), _NO_COUNTS, _NO_COUNTS)
        return out
    if group.rank != _HUB:
        return _ask(group, x, out)
    pieces = x.new_empty((group.size, *x.shape))
    _hear(group, x, pieces.unbind())
    by_receiver = pieces.view(group.size, group.size, -1).transpose(0, 1).contiguous()
    answers = by_receiver.view(group.size, *x.shape).unbind()
    _answer(group, answers)
    return out.copy_(answers[_HUB])


def all_gather(group: Group, x: Tensor, counts: Sequence[int]) -> Tensor:
    row = _row_elements(x) * x.element_size()
    way = plans.all_gather(group.backend(x.device), counts, row, on_host=x.is_cpu)
    if way == "copies":
        return all_to_all(group, torch.cat([x] * group.size), [x.shape[0]] * group.size, counts)
    out = x.new_empty(_rows(sum(counts), x))
    blocks = out.split(counts)
    if way == "hub":
        if group.rank != _HUB:
            return _ask(group, x, out)
        _hear(group, x, blocks)
        _answer(group, [out] * group.size)
        return out
    if way == "pairs":
        ahead, behind = _peers(group)
        into = [(blocks[rank], rank) for rank in behind]
        works = _start(group, [(x, rank) for rank in ahead], into)
        blocks[group.rank].copy_(x)
        _arrive(group, works)
        return out
    if way == "backend":
        call = partial(_GATHER, _moved(out), _moved(x), group=group.process_group)
        _run(group, lambda later: call(async_op=later))
        return out
    moved = [_moved(block) for block in blocks]
    if way == "backend_list":
        call = partial(dist.all_gather, moved, _moved(x), group=group.process_group)
        _run(group, lambda later: call(async_op=later))
        return out
    blocks[group.rank].copy_(x)
    start = group.process_group.broadcast
    _finish(
        group,
        lambda: [
            start([block], _broadcasts(rank)[True])
            for rank, block in enumerate(moved)
            if block.numel()
        ],
    )
    return out


def reduce_scatter(group: Group, x: Tensor, counts: Sequence[int]) -> Tensor:
    own, row = counts[group.rank], _row_elements(x) * x.element_size()
    way = plans.reduce_scatter(group.backend(x.device), counts, row, on_host=x.is_cpu)
    if way == "pairs":
        blocks: Sequence[Tensor] = x.split(counts)
        ahead, behind = _peers(group)
        return _add_from(group, blocks[group.rank], behind, [(blocks[to], to) for to in ahead])
    if way == "hub":
        if group.rank != _HUB:
            return _ask(group, x, x.new_empty(_rows(own, x)))
        pieces = x.new_empty((group.size, *x.shape))
        _hear(group, x, pieces.unbind())
        blocks = pieces.sum(0, dtype=x.dtype).split(counts)
        _answer(group, blocks)
        return blocks[_HUB].clone()  # a view would keep the whole
    if way == "exchange" or x.dtype not in _SUMMED_BY_BACKENDS:
        rows = all_to_all(group, x, counts, [own] * group.size)
        return rows.view(group.size, *_rows(own, x)).sum(0, dtype=x.dtype)
    out = x.new_empty(_rows(own, x))
    call = partial(_REDUCE_SCATTER, out, x)
    if way == "backend_list":
        call = partial(dist.reduce_scatter, out, list(x.split(counts)))
    _run(group, lambda later: call(group=group.process_group, async_op=later))
    return out


def _ask(group: Group, x: Tensor, out: Tensor) -> Tensor:
    """Send ``x`` to the hub, and take into ``out`` what it makes of everybody's."""
    _arrive(group, _start(group, [(x, _HUB)], [(out, _HUB)]))
    return out


def _hear(group: Group, x: Tensor, into: Sequence[Tensor]) -> None:
    """On the hub: take what every rank sends, its own included."""
    works = _start(group, (), [(into[rank], rank) for rank in range(1, group.size)])
    into[_HUB].copy_(x)
    _arrive(group, works)


def _answer(group: Group, out: Sequence[Tensor]) -> None:
    """On the hub: send every rank its part."""
    _arrive(group, _start(group, [(out[rank], rank) for rank in range(1, group.size)], ()))


def _peers(group: Group) -> tuple[list[int], list[int]]:
    """All other ranks: the next ones first, and the ones before first."""
    ahead = [(group.rank + k) % group.size for k in range(1, group.size)]
    return ahead, ahead[::-1]


def _add_from(group: Group, x: Tensor, sources: Sequence[int], sent: Sequence[Transfer]) -> Tensor:
    """Add to ``x`` what peers send, in this order; send something to a peer in each turn, if given.

    The next pieces are on their way meanwhile, if they are small.
    """
    ahead = min(len(sources), max(1, _AHEAD // max(1, x.nbytes)))
    incoming = x.new_empty((ahead, *x.shape)).unbind()
    total = x.clone()
    under_way: list[Sequence[Any]] = []
    for turn in range(len(sources) + ahead):
        if turn >= ahead:
            _arrive(group, under_way[turn - ahead])
            total += incoming[turn % ahead]
        if turn < len(sources):
            into = [(incoming[turn % ahead], sources[turn])]
            under_way.append(_start(group, sent[turn : turn + 1], into))
    return total


def _start(group: Group, sent: Sequence[Transfer], into: Sequence[Transfer]) -> Sequence[Any]:
    """Start to receive and to send; nothing is sent of what has no elements."""
    calls = group.process_group
    try:
        if not waiting.usual(group):
            waiting.introduce(group)
            waiting.limit(group)
        works = [calls.recv([_moved(x)], peer, _TAG) for x, peer in into if x.numel()]
        works += [calls.send([_moved(x)], peer, _TAG) for x, peer in sent if x.numel()]
    except RuntimeError as error:
        waiting.cut_off(group)
        raise waiting.explain(group, error, 0.0) from error
    return works


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


def _call(group: Group, method: str, options: tuple[Any, Any], *args: Any) -> None:
    """Make one call of the process group and wait for it."""
    if not waiting.usual(group):
        _run(group, lambda later: getattr(group.process_group, method)(*args, options[later]))
        return
    began = time.monotonic()
    try:
        work = getattr(group.process_group, method)(*args, options[False])
        if work is not None:
            work.wait()
    except RuntimeError as error:
        raise waiting.explain(group, error, time.monotonic() - began) from error


def _run(group: Group, start: Callable[[bool], Any]) -> None:
    """Make one call of the backend and wait for it; ``start(True)`` is to give what to wait for."""
    if not waiting.patient():
        _finish(group, lambda: [start(True)])
        return
    waiting.introduce(group)
    began = time.monotonic()
    try:
        work = start(False)
        if work is not None:
            work.wait()
    except RuntimeError as error:
        raise waiting.explain(group, error, time.monotonic() - began) from error


def _finish(group: Group, start: Callable[[], Sequence[Any]]) -> None:
    """Start calls, and wait for all of them as long as they may take."""
    _end(group, _begin(group, start))


def _begin(group: Group, start: Callable[[], Sequence[Any]]) -> Sequence[Any]:
    try:
        if not waiting.usual(group):
            waiting.introduce(group)
            waiting.limit(group)
        return start()
    except RuntimeError as error:
        raise waiting.explain(group, error, 0.0) from error


def _end(group: Group, works: Sequence[Any]) -> None:
    began = time.monotonic()
    try:
        for work in works:
            waiting.wait(group, work)
    except RuntimeError as error:
        raise waiting.explain(group, error, time.monotonic() - began) from error


def _moved(x: Tensor) -> Tensor:
    """What backends can move of ``x``.

    Moving needs no arithmetic: as bytes every dtype travels on every backend, bit for bit
    (test_every_dtype_travels).
    """
    if x.dtype in _KNOWN_TO_BACKENDS:
        return x
    # A single element counts as contiguous whatever its stride.
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


def _rows(count: int, x: Tensor) -> tuple[int, ...]:
    """The shape of ``x`` with another first length."""
    return (count, *x.shape[1:])


def _row_elements(x: Tensor) -> int:
    """How many elements there are for each step along the first dimension."""
    return 1 if x.dim() == 1 else prod(x.shape[1:])
