"""The backend's own calls into a process group, and algorithms made of them.

Each function is one entry of ``algorithms.TABLE``: several ranks, contiguous memory in, new memory
out. What the operations mean is said in ``primitives``.
"""

from __future__ import annotations

import time
from functools import lru_cache, partial
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from allgrad._core.partition import as_bytes
from allgrad._core.torch_internals import (
    GATHER,
    REDUCE_SCATTER,
    AllgatherOptions,
    ReduceScatterOptions,
)
from allgrad._wire import deadline, diagnosis, ended_ranks, watchdog
from allgrad.errors import RankRaised

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from allgrad._wire.calls import Call
    from allgrad._wire.groups import Group
    from allgrad._wire.wait_spec import Alike

__all__ = [
    "CAN_ADD",
    "all_gather",
    "all_gather_by_broadcasts",
    "all_gather_by_copies",
    "all_gather_list",
    "all_reduce",
    "all_to_all",
    "all_to_all_equal",
    "broadcast",
    "overwrite",
    "reduce",
    "reduce_by_gather",
    "reduce_scatter",
    "reduce_scatter_by_exchange",
    "reduce_scatter_list",
    "start_overwriting",
]

_CAN_MOVE = frozenset(
    {
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.int8, torch.uint8, torch.int32, torch.int64),
    }
)
CAN_ADD = _CAN_MOVE | {torch.complex64, torch.complex128}
_NO_COUNTS: list[int] = []


def _options(kind: Any) -> tuple[Any, Any]:
    """Options of a call that is waited for at once, and of one that is waited for later."""
    both = kind(), kind()
    for later, options in enumerate(both):
        options.asyncOp = bool(later)
    return both


# Small messages go to the process group itself: torch.distributed's functions would take half of
# their time.
_SUMS, _EXCHANGES = _options(dist.AllreduceOptions), _options(dist.AllToAllOptions)
_GATHERS, _SCATTERS = _options(AllgatherOptions), _options(ReduceScatterOptions)


@lru_cache(maxsize=1024)
def _broadcasts(src: int) -> tuple[Any, Any]:
    return _rooted(dist.BroadcastOptions, src)


@lru_cache(maxsize=1024)
def _reduces(dst: int) -> tuple[Any, Any]:
    return _rooted(dist.ReduceOptions, dst)


def _rooted(kind: Any, root: int) -> tuple[Any, Any]:
    both = _options(kind)
    for options in both:
        options.rootRank = root
    return both


# ---- all_reduce ------------------------------------------------------------------------------


def all_reduce(call: Call, x: Tensor, scratch: bool = False) -> Tensor:
    out = x if scratch else x.clone()
    summed = [torch.view_as_real(out) if x.is_complex() else out]
    _call(call, "allreduce", _SUMS, summed)
    return out


# ---- broadcast, reduce -----------------------------------------------------------------------


def broadcast(call: Call, x: Tensor, src: int) -> Tensor:
    return overwrite(call, x.clone() if call.rank == src else torch.empty_like(x), src)


def overwrite(call: Call, x: Tensor, src: int) -> Tensor:
    """Broadcast into ``x`` itself."""
    _call(call, "broadcast", _broadcasts(src), [_movable(x)])
    return x


def start_overwriting(call: Call, x: Tensor, src: int) -> Callable[[], None]:
    """Start to broadcast into ``x`` itself; the result waits for it."""
    moved, options = [_movable(x)], _broadcasts(src)[True]
    works = _begin(call, lambda: [call.group.process_group.broadcast(moved, options)])
    return lambda: _end(call, works)


def reduce(call: Call, x: Tensor, dst: int) -> Tensor:
    out = x.clone()  # backends overwrite the input, also off dst
    _call(call, "reduce", _reduces(dst), [out])
    return out if call.rank == dst else torch.zeros_like(x)


def reduce_by_gather(call: Call, x: Tensor, dst: int) -> Tensor:
    """All pieces to ``dst``, which adds them."""
    n, here = x.numel(), call.rank == dst
    send = [n if rank == dst else 0 for rank in range(call.size)]
    rows = all_to_all(call, x.view(-1), send, [n if here else 0] * call.size)
    if not here:
        return torch.zeros_like(x)
    return rows.view(call.size, *x.shape).sum(0, dtype=x.dtype)


# ---- all_to_all ------------------------------------------------------------------------------


def all_to_all(
    call: Call,
    x: Tensor,
    send: Sequence[int],
    receive: Sequence[int],
    equal: bool = False,
    _peers: object = None,
    *,
    alike: Alike | None = None,
) -> Tensor:
    if equal:  # without counts: handing those over would take longer than all else
        out, send, receive = torch.empty_like(x), _NO_COUNTS, _NO_COUNTS
    else:
        out = x.new_empty((sum(receive), *x.shape[1:]))
    into, sent = out, x
    if x.dtype not in _CAN_MOVE:
        into, sent = as_bytes(out), as_bytes(x)
        width = prod(x.shape[1:]) * x.element_size()
        send, receive = [n * width for n in send], [n * width for n in receive]
    _call(call, "alltoall_base", _EXCHANGES, into, sent, receive, send, alike=alike)
    return out


def all_to_all_equal(call: Call, x: Tensor, alike: Alike | None = None) -> Tensor:
    """Blocks of one size; ``alike`` fits what the other ranks bring, if all is well."""
    return all_to_all(call, x, _NO_COUNTS, _NO_COUNTS, equal=True, alike=alike)


# ---- all_gather ------------------------------------------------------------------------------


def all_gather(call: Call, x: Tensor, counts: Sequence[int]) -> Tensor:
    out = x.new_empty((sum(counts), *x.shape[1:]))
    _call(call, GATHER, _GATHERS, _movable(out), _movable(x))
    return out


def all_gather_list(call: Call, x: Tensor, counts: Sequence[int]) -> Tensor:
    """With a list of outputs, which may have unequal lengths."""
    out = x.new_empty((sum(counts), *x.shape[1:]))
    blocks = [_movable(block) for block in out.split(counts)]
    gather = partial(dist.all_gather, blocks, _movable(x), group=call.group.process_group)
    _run(call, lambda later: gather(async_op=later))
    return out


def all_gather_by_copies(call: Call, x: Tensor, counts: Sequence[int]) -> Tensor:
    """One all_to_all of a copy for each rank."""
    copies = torch.cat([x] * call.size)
    if len(set(counts)) == 1:
        return all_to_all_equal(call, copies)
    return all_to_all(call, copies, [x.shape[0]] * call.size, counts)


def all_gather_by_broadcasts(call: Call, x: Tensor, counts: Sequence[int]) -> Tensor:
    """One broadcast for each rank, into its block of the output, all at once."""
    out = x.new_empty((sum(counts), *x.shape[1:]))
    blocks = out.split(counts)
    blocks[call.rank].copy_(x)
    start = call.group.process_group.broadcast
    works = _begin(
        call,
        lambda: [
            start([_movable(block)], _broadcasts(rank)[True])
            for rank, block in enumerate(blocks)
            if block.numel()
        ],
    )
    _end(call, works)
    return out


# ---- reduce_scatter --------------------------------------------------------------------------


def reduce_scatter(call: Call, x: Tensor, counts: Sequence[int]) -> Tensor:
    out = x.new_empty((counts[call.rank], *x.shape[1:]))
    into, sent = (torch.view_as_real(out), torch.view_as_real(x)) if x.is_complex() else (out, x)
    _call(call, REDUCE_SCATTER, _SCATTERS, into, sent)
    return out


def reduce_scatter_list(call: Call, x: Tensor, counts: Sequence[int]) -> Tensor:
    """With a list of inputs, which may have unequal lengths."""
    out = x.new_empty((counts[call.rank], *x.shape[1:]))
    blocks = list(x.split(counts))
    scatter = partial(dist.reduce_scatter, out, blocks, group=call.group.process_group)
    _run(call, lambda later: scatter(async_op=later))
    return out


def reduce_scatter_by_exchange(call: Call, x: Tensor, counts: Sequence[int]) -> Tensor:
    """One all_to_all, then each rank adds what it received."""
    own = counts[call.rank]
    if len(set(counts)) == 1:
        rows = all_to_all_equal(call, x)
    else:
        rows = all_to_all(call, x, counts, [own] * call.size)
    return rows.view(call.size, own, *x.shape[1:]).sum(0, dtype=x.dtype)


# ---- what they share -------------------------------------------------------------------------


def _call(
    call: Call, method: str, options: tuple[Any, Any], *args: Any, alike: Alike | None = None
) -> None:
    """Make one call of the process group and wait for it."""
    group = call.group
    if watchdog.STATE.thread is None or not (group.registered and deadline.STATE.no_deadline):
        _run(call, partial(_begin_one, group, method, options, args), alike)
        return
    begin = getattr(group.process_group, method)
    began = time.monotonic()
    group.waiting = call, alike, began
    try:
        work = begin(*args, options[False])
        if work is not None:
            work.wait()
    except RuntimeError as error:
        raise _explained(call, error, began, alike) from error
    finally:
        group.waiting = None


def _begin_one(
    group: Group, method: str, options: tuple[Any, Any], args: Sequence[Any], later: bool
) -> Any:
    return getattr(group.process_group, method)(*args, options[later])


def _run(call: Call, start: Callable[[bool], Any], alike: Alike | None = None) -> None:
    """Make one call of the backend and wait for it; ``start(True)`` gives what to wait for."""
    if not deadline.STATE.no_deadline:
        _end(call, _begin(call, lambda: [start(True)]), alike)
        return
    if not call.group.registered:
        deadline.prepare(call)
    if watchdog.STATE.thread is None:
        watchdog.start()
    began = time.monotonic()
    call.group.waiting = call, alike, began
    try:
        work = start(False)
        if work is not None:
            work.wait()
    except RuntimeError as error:
        raise _explained(call, error, began, alike) from error
    finally:
        call.group.waiting = None


def _begin(call: Call, start: Callable[[], Sequence[Any]]) -> Sequence[Any]:
    """Start calls of the backend."""
    began = time.monotonic()
    try:
        if not (deadline.STATE.no_deadline and call.group.registered):
            deadline.prepare(call)
        return start()
    except RuntimeError as error:
        raise _explained(call, error, began) from error


def _end(call: Call, works: Sequence[Any], alike: Alike | None = None) -> None:
    """Wait for all of them, as long as the deadline allows."""
    began = time.monotonic()
    if deadline.seconds_allowed() is None:
        if watchdog.STATE.thread is None:
            watchdog.start()
        call.group.waiting = call, alike, began
    try:
        for work in works:
            deadline.wait(call, work)
    except RuntimeError as error:
        raise _explained(call, error, began, alike) from error
    except RankRaised as error:
        call.group.failed = True
        found = watchdog.take_found(call, began)
        if found is None:
            ended_ranks.publish(error)
            raise
        raise found from error
    finally:
        call.group.waiting = None


def _explained(
    call: Call, error: RuntimeError, began: float, alike: Alike | None = None
) -> Exception:
    call.group.failed = True
    waited, seconds = time.monotonic() - began, deadline.seconds_allowed()
    return watchdog.take_found(call, began) or diagnosis.explain(
        call, error, waited, seconds, alike
    )


def _movable(x: Tensor) -> Tensor:
    """``x``, or its bytes where the backend does not know the dtype.

    Moving needs no arithmetic: as bytes every dtype travels on every backend, bit for bit
    (test_every_dtype_travels).
    """
    return x if x.dtype in _CAN_MOVE else as_bytes(x)
