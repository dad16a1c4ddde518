"""The only mover of bytes: plain tensors between ranks, over torch.distributed.

No gradients here. Every call takes flat contiguous memory (a tensor of one dimension) with counts
of elements by rank, leaves it as it was, and returns new memory. Six calls are enough: whatever
gathers, scatters or permutes is an ``all_to_all`` with the right counts.
"""

from __future__ import annotations

import time
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from allgrad import departures, graph_wire, plans, waiting
from allgrad.groups import Group, GroupLike, message_device, resolve
from allgrad.ragged import even

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

__all__ = [
    "Group",
    "GroupLike",
    "Planned",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "message_device",
    "overwrite",
    "reduce",
    "reduce_scatter",
    "resolve",
    "send_words",
    "watch",
]

_KNOWN_TO_BACKENDS = frozenset(
    {
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.int8, torch.uint8, torch.int32, torch.int64),
    }
)
_SUMMED_BY_BACKENDS = _KNOWN_TO_BACKENDS | {torch.complex64, torch.complex128}


class Planned(NamedTuple):
    """A call that is about to happen, as the ranks must agree on it."""

    op: str
    dtype: torch.dtype
    device: torch.device
    elements: int
    root: int = -1
    send: Sequence[int] = ()
    receive: Sequence[int] = ()


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

_watcher: Callable[[Group, Planned], AbstractContextManager[None]] | None = None


def watch(watcher: Callable[[Group, Planned], AbstractContextManager[None]] | None) -> None:
    """Have every call happen inside ``watcher(group, planned)``; ``None`` ends it."""
    global _watcher  # noqa: PLW0603
    _watcher = watcher


def all_reduce(group: Group, x: Tensor, *, scratch: bool = False) -> Tensor:
    """Sum over ranks, on every rank; of contiguous memory in any shape.

    ``scratch`` gives ``x`` away: the result may take its memory.
    """
    if _stays_here(group, x):
        return x if scratch else x.clone()
    if graph_wire.in_graph(x):
        if x.dim() == 1:
            return graph_wire.all_reduce(x, group.name)
        return graph_wire.all_reduce(x.view(-1), group.name).view(x.shape)
    if _watcher is None and departures.free():
        return _all_reduce(group, x, scratch)
    planned = lambda: Planned("all_reduce", x.dtype, x.device, x.numel())  # noqa: E731
    return _watched(group, planned, _all_reduce, x, scratch)


def broadcast(group: Group, x: Tensor, src: int) -> Tensor:
    """What ``src`` holds, on every rank."""
    if _stays_here(group, x):
        return x.clone()
    if graph_wire.in_graph(x):
        return graph_wire.broadcast(x, src, group.name)
    planned = lambda: Planned("broadcast", x.dtype, x.device, x.numel(), src)  # noqa: E731
    return _watched(group, planned, _broadcast, x, src)


def overwrite(group: Group, x: Tensor, src: int) -> Callable[[], None]:
    """Start to broadcast into ``x`` itself; what it gives waits for that. Others may start before.

    What ``x`` held is gone, except on ``src``.
    """
    if _watcher is None and departures.free():
        moved, options = [_moved(x)[0]], _broadcasts(src)[True]
        works = _begin(group, lambda: [group.process_group.broadcast(moved, options)])
        return lambda: _end(group, works)
    planned = lambda: Planned("broadcast", x.dtype, x.device, x.numel(), src)  # noqa: E731
    _watched(group, planned, _overwrite, x, src)
    return lambda: None


def reduce(group: Group, x: Tensor, dst: int) -> Tensor:
    """Sum over ranks on ``dst``; zeros on the others."""
    if _stays_here(group, x):
        return x.clone()
    if graph_wire.in_graph(x):
        return graph_wire.reduce(x, dst, group.rank, group.size, group.name)
    planned = lambda: Planned("reduce", x.dtype, x.device, x.numel(), dst)  # noqa: E731
    return _watched(group, planned, _reduce, x, dst)


def all_to_all(group: Group, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """Block ``r`` of ``x`` to rank ``r``; the blocks received, in rank order."""
    if _stays_here(group, x):
        return x.clone() if group.size == 1 else x.new_empty(sum(receive))
    if graph_wire.in_graph(x):
        return graph_wire.all_to_all(x, send, receive, group.name)
    planned = lambda: Planned("all_to_all", x.dtype, x.device, 0, -1, send, receive)  # noqa: E731
    return _watched(group, planned, _all_to_all, x, send, receive)


def all_gather(group: Group, x: Tensor, counts: Sequence[int]) -> Tensor:
    """Every rank's block, in rank order, on every rank."""
    if _stays_here(group, x):
        return x.clone() if group.size == 1 else x.new_empty(sum(counts))
    if graph_wire.in_graph(x):
        return graph_wire.all_gather(x, counts, group.name)
    planned = lambda: Planned("all_gather", x.dtype, x.device, 0, -1, counts)  # noqa: E731
    return _watched(group, planned, _all_gather, x, counts)


def reduce_scatter(group: Group, x: Tensor, counts: Sequence[int]) -> Tensor:
    """Block ``r`` of ``x``, summed over ranks, on rank ``r``."""
    if _stays_here(group, x):
        return x.clone() if group.size == 1 else x.new_empty(counts[group.rank])
    if graph_wire.in_graph(x):
        return graph_wire.reduce_scatter(x, counts, group.rank, group.name)
    planned = lambda: Planned("reduce_scatter", x.dtype, x.device, 0, -1, counts)  # noqa: E731
    return _watched(group, planned, _reduce_scatter, x, counts)


def send_words(
    group: Group,
    words: Sequence[int],
    send: Sequence[int],
    receive: Sequence[int],
    device: torch.device,
) -> list[int]:
    """Send whole numbers to every rank, unwatched, and hear theirs."""
    flat = torch.tensor(words, dtype=torch.int64, device=message_device(group, device))
    heard: list[int] = _all_to_all(group, flat, send, receive).tolist()
    return heard


def _stays_here(group: Group, x: Tensor) -> bool:
    """No communication: a world of one, or a meta tensor that only has a shape."""
    return group.size == 1 or x.is_meta


def _watched(
    group: Group, planned: Callable[[], Planned], move: Callable[..., Tensor], *args: Any
) -> Tensor:
    if _watcher is None and departures.free():
        return move(group, *args)
    return departures.in_turn(lambda: _now(group, planned, move, *args))


def _now(
    group: Group, planned: Callable[[], Planned], move: Callable[..., Tensor], *args: Any
) -> Tensor:
    if _watcher is None:
        return move(group, *args)
    with _watcher(group, planned()):
        return move(group, *args)


def _all_reduce(group: Group, x: Tensor, scratch: bool = False) -> Tensor:
    if x.dtype not in _SUMMED_BY_BACKENDS:
        counts = even(x.numel(), group.size)
        own = _reduce_scatter(group, x.view(-1), counts)
        return _all_gather(group, own, counts).view(x.shape)
    out = x if scratch else x.clone()
    summed = [torch.view_as_real(out) if x.is_complex() else out]
    _call(group, "allreduce", _SUMS, summed)
    return out


def _broadcast(group: Group, x: Tensor, src: int) -> Tensor:
    return _overwrite(group, x.clone() if group.rank == src else torch.empty_like(x), src)


def _overwrite(group: Group, x: Tensor, src: int) -> Tensor:
    _call(group, "broadcast", _broadcasts(src), [_moved(x)[0]])
    return x


def _reduce(group: Group, x: Tensor, dst: int) -> Tensor:
    on_host = x.device.type == "cpu"
    way = plans.reduce(group.backend(x.device), on_host=on_host)
    here = group.rank == dst
    if way == "backend" and x.dtype in _SUMMED_BY_BACKENDS:
        out = x.clone()
        call = partial(dist.reduce, out, group_dst=dst, group=group.process_group)
        _run(group, lambda later: call(async_op=later))
        return out if here else torch.zeros_like(x)
    if way == "sends":
        peers = [rank for rank in range(group.size) if rank != dst]
        if here:
            return _add_from(group, x, [(None, peer) for peer in peers])
        if x.numel():
            _finish(group, lambda: [_send(group, x, dst)])
        return torch.zeros_like(x)
    n = x.numel()
    send = [n if rank == dst else 0 for rank in range(group.size)]
    rows = _all_to_all(group, x, send, [n if here else 0] * group.size)
    return rows.view(group.size, n).sum(0, dtype=x.dtype) if here else torch.zeros_like(x)


def _all_to_all(group: Group, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    out = x.new_empty(sum(receive))
    (into, width), (sent, _) = _moved(out), _moved(x)
    blocks = into, sent, [n * width for n in receive], [n * width for n in send]
    _call(group, "alltoall_base", _EXCHANGES, *blocks)
    return out


def _all_gather(group: Group, x: Tensor, counts: Sequence[int]) -> Tensor:
    way = plans.all_gather(group.backend(x.device), counts, x.element_size())
    if way == "copies":
        return _all_to_all(group, x.repeat(group.size), [x.numel()] * group.size, counts)
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


def _reduce_scatter(group: Group, x: Tensor, counts: Sequence[int]) -> Tensor:
    own, on_host = counts[group.rank], x.device.type == "cpu"
    way = plans.reduce_scatter(group.backend(x.device), counts, x.element_size(), on_host=on_host)
    if way == "pairs":
        blocks = x.split(list(counts))
        ahead = [(group.rank + k) % group.size for k in range(1, group.size)]
        behind = [(group.rank - k) % group.size for k in range(1, group.size)]
        sent = [(blocks[to], to) for to in ahead]
        return _add_from(group, blocks[group.rank], list(zip(sent, behind, strict=True)))
    if way == "exchange" or x.dtype not in _SUMMED_BY_BACKENDS:
        rows = _all_to_all(group, x, counts, [own] * group.size)
        return rows.view(group.size, own).sum(0, dtype=x.dtype)
    out = x.new_empty(own)
    call = partial(_REDUCE_SCATTER, out, x)
    if way == "backend_list":
        call = partial(dist.reduce_scatter, out, list(x.split(list(counts))))
    _run(group, lambda later: call(group=group.process_group, async_op=later))
    return out


def _add_from(
    group: Group, x: Tensor, turns: Sequence[tuple[tuple[Tensor, int] | None, int]]
) -> Tensor:
    """Add to ``x`` what peers send, one after another; each turn may send a block elsewhere too."""
    total, incoming = x.clone(), torch.empty_like(x)
    for sent, source in turns:
        works: list[Callable[[], Any]] = []
        if sent is not None and sent[0].numel():
            works.append(partial(_send, group, *sent))
        if incoming.numel():
            works.append(partial(_receive, group, incoming, source))
        _finish(group, lambda works=works: [start() for start in works])  # type: ignore[misc]
        if incoming.numel():
            total += incoming
    return total


def _send(group: Group, x: Tensor, to: int) -> Any:
    return group.process_group.send([_moved(x)[0]], to, 0)


def _receive(group: Group, into: Tensor, source: int) -> Any:
    return group.process_group.recv([_moved(into)[0]], source, 0)


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
    waiting.introduce(group)
    try:
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
