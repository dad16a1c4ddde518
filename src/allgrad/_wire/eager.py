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

from allgrad._core.partition import even
from allgrad._wire import algorithms as plans
from allgrad._wire import deadline as waiting
from allgrad._wire import point_to_point as peers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from allgrad._wire.groups import Group

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
_NO_COUNTS: list[int] = []


def _options(kind: Any) -> tuple[Any, Any]:
    """Options of a call that is waited for at once, and of one that is waited for later."""
    both = kind(), kind()
    for later, options in enumerate(both):
        if hasattr(options, "asyncOp"):  # not in torch 2.6, where every call is waited for later
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
    if way == "shares":
        return peers.add_up(group, x, x if scratch else torch.empty_like(x))
    if way == "hub":
        if group.size == 2:
            return peers.meet(group, x)
        if group.rank != peers.HUB:
            return peers.ask(group, x, torch.empty_like(x))
        pieces = x.new_empty((group.size, *x.shape))
        peers.hear(group, x, pieces.unbind())
        total = pieces.sum(0, dtype=x.dtype)
        peers.answer(group, [total] * group.size)
        return total
    out = x if scratch else x.clone()
    summed = [torch.view_as_real(out) if x.is_complex() else out]
    _call(group, "allreduce", _SUMS, summed)
    return out


def broadcast(group: Group, x: Tensor, src: int) -> Tensor:
    backend = group.backend(x.device)
    way = plans.broadcast(backend, group.size, x.nbytes, on_host=x.is_cpu)
    if way == "sends":
        return peers.send_out(group, x, src)
    if way == "shares":
        return peers.share_out(group, x, src)
    return overwrite(group, x.clone() if group.rank == src else torch.empty_like(x), src)


def overwrite(group: Group, x: Tensor, src: int) -> Tensor:
    _call(group, "broadcast", _broadcasts(src), [_moved(x)])
    return x


def start_overwriting(group: Group, x: Tensor, src: int) -> Callable[[], None]:
    moved, options = [_moved(x)], _broadcasts(src)[True]
    works = _begin(group, lambda: [group.process_group.broadcast(moved, options)])
    return lambda: _end(group, works)


def reduce(group: Group, x: Tensor, dst: int) -> Tensor:
    way = plans.reduce(group.backend(x.device), group.size, x.nbytes, on_host=x.is_cpu)
    if way == "sends":
        return peers.bring(group, x, dst)
    if way == "shares":
        return peers.bring_shares(group, x, dst)
    here = group.rank == dst
    if way == "backend" and x.dtype in _SUMMED_BY_BACKENDS:
        out = x.clone()
        call = partial(dist.reduce, out, group_dst=dst, group=group.process_group)
        _run(group, lambda later: call(async_op=later))
        return out if here else torch.zeros_like(x)
    n = x.numel()
    send = [n if rank == dst else 0 for rank in range(group.size)]
    rows = _exchange_counted(group, x.view(-1), send, [n if here else 0] * group.size)
    if not here:
        return torch.zeros_like(x)
    return rows.view(group.size, *x.shape).sum(0, dtype=x.dtype)


def all_to_all(
    group: Group, x: Tensor, send: Sequence[int], receive: Sequence[int], equal: bool = False
) -> Tensor:
    if not equal:
        return _exchange_counted(group, x, send, receive)
    way = plans.all_to_all(group.backend(x.device), group.size, x.nbytes, on_host=x.is_cpu)
    if way == "backend":
        return _exchange_equal(group, x)
    out = torch.empty_like(x)
    if way != "hub":
        by_rank = group.size, x.numel() // group.size
        exchange = peers.take_turns if way == "turns" else peers.trade
        exchange(group, x.view(by_rank).unbind(), out.view(by_rank).unbind())
        return out
    if group.rank != peers.HUB:
        return peers.ask(group, x, out)
    pieces = x.new_empty((group.size, *x.shape))
    peers.hear(group, x, pieces.unbind())
    blocks = pieces.view(group.size, group.size, x.numel() // group.size)
    answers = blocks.transpose(0, 1).contiguous().view(group.size, *x.shape).unbind()
    peers.answer(group, answers)
    return out.copy_(answers[peers.HUB])


def _exchange_counted(
    group: Group, x: Tensor, send: Sequence[int], receive: Sequence[int]
) -> Tensor:
    out = x.new_empty(_rows(sum(receive), x))
    into, sent = out, x
    if x.dtype not in _KNOWN_TO_BACKENDS:
        into, sent = _as_bytes(out), _as_bytes(x)
        width = _row_elements(x) * x.element_size()
        send, receive = [n * width for n in send], [n * width for n in receive]
    _call(group, "alltoall_base", _EXCHANGES, into, sent, receive, send)
    return out


def _exchange_equal(group: Group, x: Tensor) -> Tensor:
    """By the backend, without counts, which take longer to hand over than all else."""
    out = torch.empty_like(x)
    into, sent = out, x
    if x.dtype not in _KNOWN_TO_BACKENDS:
        into, sent = _as_bytes(out), _as_bytes(x)
    _call(group, "alltoall_base", _EXCHANGES, into, sent, _NO_COUNTS, _NO_COUNTS)
    return out


def all_gather(group: Group, x: Tensor, counts: Sequence[int]) -> Tensor:
    row = _row_elements(x) * x.element_size()
    way = plans.all_gather(group.backend(x.device), counts, row, on_host=x.is_cpu)
    if way == "copies":
        copies = torch.cat([x] * group.size)
        if len(set(counts)) == 1:
            return _exchange_equal(group, copies)
        return _exchange_counted(group, copies, [x.shape[0]] * group.size, counts)
    out = x.new_empty(_rows(sum(counts), x))
    if way == "backend":
        call = partial(_GATHER, _moved(out), _moved(x), group=group.process_group)
        _run(group, lambda later: call(async_op=later))
        return out
    blocks = out.split(counts)
    if way == "hub":
        if group.rank != peers.HUB:
            return peers.ask(group, x, out)
        peers.hear(group, x, blocks)
        peers.answer(group, [out] * group.size)
        return out
    if way == "pairs":
        peers.trade(group, [x] * group.size, blocks)
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
        return peers.add_own(group, dict(enumerate(x.split(counts))))
    if way == "hub":
        if group.rank != peers.HUB:
            return peers.ask(group, x, x.new_empty(_rows(own, x)))
        pieces = x.new_empty((group.size, *x.shape))
        peers.hear(group, x, pieces.unbind())
        blocks: Sequence[Tensor] = pieces.sum(0, dtype=x.dtype).split(counts)
        peers.answer(group, blocks)
        return blocks[peers.HUB].clone()  # a view would keep the whole
    if way == "exchange" or x.dtype not in _SUMMED_BY_BACKENDS:
        equal = len(set(counts)) == 1
        rows = (
            _exchange_equal(group, x)
            if equal
            else _exchange_counted(group, x, counts, [own] * group.size)
        )
        return rows.view(group.size, *_rows(own, x)).sum(0, dtype=x.dtype)
    out = x.new_empty(_rows(own, x))
    call = partial(_REDUCE_SCATTER, out, x)
    if way == "backend_list":
        call = partial(dist.reduce_scatter, out, list(x.split(counts)))
    _run(group, lambda later: call(group=group.process_group, async_op=later))
    return out


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


def _rows(count: int, x: Tensor) -> tuple[int, ...]:
    """The shape of ``x`` with another first length."""
    return (count, *x.shape[1:])


def _row_elements(x: Tensor) -> int:
    """How many elements there are for each step along the first dimension."""
    return 1 if x.dim() == 1 else prod(x.shape[1:])


def _moved(x: Tensor) -> Tensor:
    """What backends' collectives can move of ``x``."""
    return x if x.dtype in _KNOWN_TO_BACKENDS else _as_bytes(x)


def _as_bytes(x: Tensor) -> Tensor:
    """Moving needs no arithmetic: as bytes every dtype travels on every backend, bit for bit
    (test_every_dtype_travels).
    """
    # A single element counts as contiguous whatever its stride.
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)
