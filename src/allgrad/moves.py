"""How bytes are moved: every call of the wire, in the ways that ``plans`` chooses from.

Here is real memory among several ranks. What the calls mean is said in ``wire``.
"""

from __future__ import annotations

import time
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from allgrad import plans, waiting
from allgrad.ragged import even

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    from torch import Tensor

    from allgrad.groups import Group

    # "send" or "recv", from or into what, and who is at the other end.
    Transfer: TypeAlias = tuple[str, Tensor, int]

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
    if x.dtype not in _SUMMED_BY_BACKENDS:
        counts = even(x.numel(), group.size)
        own = reduce_scatter(group, x.view(-1), counts)
        return all_gather(group, own, counts).view(x.shape)
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
        works = _start(group, [("send", x, rank) for rank in range(group.size) if rank != src])
        out = x.clone()
    else:
        out = torch.empty_like(x)
        works = _start(group, [("recv", out, src)])
    _end(group, works)
    return out


def overwrite(group: Group, x: Tensor, src: int) -> Tensor:
    _call(group, "broadcast", _broadcasts(src), [_moved(x)[0]])
    return x


def start_overwriting(group: Group, x: Tensor, src: int) -> Callable[[], None]:
    moved, options = [_moved(x)[0]], _broadcasts(src)[True]
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
            return _add_from(group, x, [((), rank) for rank in range(group.size) if rank != dst])
        works = _start(group, [("send", x, dst)])
        out = torch.zeros_like(x)
        _end(group, works)
        return out
    n = x.numel()
    send = [n if rank == dst else 0 for rank in range(group.size)]
    rows = all_to_all(group, x, send, [n if here else 0] * group.size)
    return rows.view(group.size, n).sum(0, dtype=x.dtype) if here else torch.zeros_like(x)


def all_to_all(group: Group, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    out = x.new_empty(sum(receive))
    (into, width), (sent, _) = _moved(out), _moved(x)
    if width > 1:
        send, receive = [n * width for n in send], [n * width for n in receive]
    _call(group, "alltoall_base", _EXCHANGES, into, sent, receive, send)
    return out


def all_gather(group: Group, x: Tensor, counts: Sequence[int]) -> Tensor:
    way = plans.all_gather(group.backend(x.device), counts, x.element_size())
    if way == "copies":
        copies = torch.cat([x] * group.size)
        return all_to_all(group, copies, [x.numel()] * group.size, counts)
    out = x.new_empty(sum(counts))
    (into, width), (sent, _) = _moved(out), _moved(x)
    if way == "backend":
        call = partial(_GATHER, into, sent, group=group.process_group)
        _run(group, lambda later: call(async_op=later))
        return out
    blocks = list(into.split([count * width for count in counts]))
    if way == "backend_list":
        call = partial(dist.all_gather, blocks, sent, group=group.process_group)
        _run(group, lambda later: call(async_op=later))
        return out
    blocks[group.rank].copy_(sent)
    start = group.process_group.broadcast
    _finish(
        group,
        lambda: [
            start([block], _broadcasts(rank)[True])
            for rank, block in enumerate(blocks)
            if block.numel()
        ],
    )
    return out


def reduce_scatter(group: Group, x: Tensor, counts: Sequence[int]) -> Tensor:
    own, backend = counts[group.rank], group.backend(x.device)
    way = plans.reduce_scatter(backend, counts, x.element_size(), on_host=x.is_cpu)
    if way == "pairs":
        blocks = x.split(list(counts))
        ahead = [(group.rank + k) % group.size for k in range(1, group.size)]
        behind = [(group.rank - k) % group.size for k in range(1, group.size)]
        sent = [[("send", blocks[to], to)] for to in ahead]
        return _add_from(group, blocks[group.rank], list(zip(sent, behind, strict=True)))
    if way == "exchange" or x.dtype not in _SUMMED_BY_BACKENDS:
        rows = all_to_all(group, x, counts, [own] * group.size)
        return rows.view(group.size, own).sum(0, dtype=x.dtype)
    out = x.new_empty(own)
    call = partial(_REDUCE_SCATTER, out, x)
    if way == "backend_list":
        call = partial(dist.reduce_scatter, out, list(x.split(list(counts))))
    _run(group, lambda later: call(group=group.process_group, async_op=later))
    return out


def _add_from(group: Group, x: Tensor, turns: Sequence[tuple[Sequence[Transfer], int]]) -> Tensor:
    """Add to ``x`` what peers send, in this order; each turn may send elsewhere too.

    The next pieces are on their way meanwhile, if they are small.
    """
    ahead = min(len(turns), max(1, _AHEAD // max(1, x.nbytes)))
    incoming = x.new_empty(ahead, x.numel()).unbind()
    total = x.clone()
    under_way: list[tuple[Sequence[Any], Tensor]] = []
    for turn, (sent, source) in enumerate(turns):
        if turn >= ahead:
            _add_next(group, total, under_way)
        into = incoming[turn % ahead]
        under_way.append((_start(group, [*sent, ("recv", into, source)]), into))
    while under_way:
        _add_next(group, total, under_way)
    return total


def _add_next(group: Group, total: Tensor, under_way: list[tuple[Sequence[Any], Tensor]]) -> None:
    works, piece = under_way.pop(0)
    _end(group, works)
    total += piece


def _start(group: Group, transfers: Sequence[Transfer]) -> Sequence[Any]:
    """Start to send and receive; nothing is sent of what has no elements."""
    calls = group.process_group
    return _begin(
        group,
        lambda: [
            getattr(calls, way)([_moved(x)[0]], peer, 0) for way, x, peer in transfers if x.numel()
        ],
    )


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


def _moved(x: Tensor) -> tuple[Tensor, int]:
    """What backends can move of ``x``, and how many of its elements make one of those of ``x``.

    Moving needs no arithmetic: as bytes every dtype travels on every backend, bit for bit
    (test_every_dtype_travels).
    """
    if x.dtype in _KNOWN_TO_BACKENDS:
        return x, 1
    # A single element counts as contiguous whatever its stride.
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8), x.element_size()
