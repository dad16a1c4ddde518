"""Six calls that move plain tensors between ranks. Everything else is made of them.

No gradients here. Every call leaves its input as it was and returns new contiguous memory. Counts
by rank are lengths along the first dimension. Whatever gathers, scatters or permutes is an
``all_to_all`` with the right counts.

All six go through one dispatcher. A call waits for the async calls before it, is agreed on by the
ranks in checked mode, and then runs the algorithm that ``algorithms`` chooses. One more exchanges
messages whose length the receiver does not know, where the backend can.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from allgrad._core import call_queue
from allgrad._core.blocks import Blocks
from allgrad._core.call_queue import QUEUES
from allgrad._core.torch_internals import PROFILER, PROFILING, is_zero_tensor
from allgrad._wire import costs, eager, observers, pairwise
from allgrad._wire.algorithms import (
    CHOSEN,
    MOVE_PARTS,
    Algorithm,
    choose,
    keep_choice,
)
from allgrad._wire.calls import Call, resolve
from allgrad._wire.codec import DTYPES, dtype_name
from allgrad._wire.groups import Backend, GroupLike
from allgrad._wire.hosts import find_topology
from allgrad._wire.observers import LOGGER, STATE
from allgrad._wire.pairwise import Parts
from allgrad._wire.situation import PART, Situation
from allgrad.errors import ReductionError, TensorError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from typing import TypeAlias

    Watcher: TypeAlias = Callable[[Call, "WireCall"], AbstractContextManager[None]]

__all__ = [
    "WATCHERS",
    "Call",
    "GroupLike",
    "Parts",
    "WireCall",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_all_unsized",
    "broadcast",
    "goes_unsized",
    "moves_parts",
    "overwrite",
    "reduce",
    "reduce_scatter",
    "resolve",
]


class WireCall(NamedTuple):
    """A wire call that is about to happen, as the ranks must agree on it."""

    operation: str
    dtype: torch.dtype
    device: torch.device
    elements: int
    root: int = -1
    send: Sequence[int] = ()
    receive: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class _Operation:
    """What the dispatcher needs to know of one of the six calls; all take its own arguments.

    name: as in ``algorithms.TABLE``.
    alone: the result in a world of one.
    sizes: piece, total and equal of its ``Situation``; None where every rank's piece is like x.
    rooted: whether its first argument is src or dst.
    counts: how many of its arguments are counts by rank.
    adds: whether it adds up what the ranks hold.
    only: the algorithm of an operation that has no choice.
    """

    name: str
    alone: Callable[..., Tensor]
    sizes: Callable[..., tuple[int, int, bool]] | None = None
    rooted: bool = False
    counts: int = 0
    adds: bool = False
    only: Algorithm | None = None


# Blocks in which every call runs inside ``watcher(call, wire_call)``.
WATCHERS: Blocks[Watcher] = Blocks()


def all_reduce(call: Call, x: Tensor, scratch: bool = False) -> Tensor:
    """Sum over ranks, on every rank.

    ``scratch`` gives ``x`` away: the result may take its memory.
    """
    return _dispatch(_ALL_REDUCE, call, x, (scratch,))


def broadcast(call: Call, x: Tensor, src: int) -> Tensor:
    """What ``src`` holds, on every rank."""
    return _dispatch(_BROADCAST, call, x, (src,))


def reduce(call: Call, x: Tensor, dst: int) -> Tensor:
    """Sum over ranks on ``dst``; zeros on the others."""
    return _dispatch(_REDUCE, call, x, (dst,))


def all_to_all(  # noqa: PLR0917
    call: Call,
    x: Tensor,
    send: Sequence[int],
    receive: Sequence[int],
    equal: bool = False,
    peers: tuple[Sequence[int], Sequence[int]] | None = None,
    parts: tuple[Parts, Parts] | None = None,
) -> Tensor:
    """Block ``r`` of ``x`` to rank ``r``; the blocks received, in rank order.

    ``equal`` promises that all blocks between all ranks have one size. ``peers`` are the ranks that
    this one sends to and receives from, where these are not all. With ``parts``, of what is sent and
    of what is received, blocks need not stand together; only where ``moves_parts``.
    """
    operation = _ALL_TO_ALL_EQUAL if equal else _ALL_TO_ALL
    args = (send, receive, equal, peers)
    return _dispatch(operation, call, x, args if parts is None else (*args, parts))


def all_to_all_unsized(
    call: Call, x: Tensor, sends: Sequence[Tensor], recvs: Sequence[Tensor]
) -> None:
    """``sends[r]``, flat and of bytes, to rank ``r``, which need not know its length.

    It comes into the beginning of ``recvs[r]``; all of these have the longest length there can be.
    Only where ``goes_unsized``. A message begins with its length in bytes, a word of 64 bits; ``x`` is
    the memory of all that is sent.
    """
    if STATE.recorder is not None:  # it tells the bytes of x, whose memory may have gaps
        x = x.new_empty(sum([sent.shape[0] for sent in sends]))
    _dispatch(_ALL_TO_ALL_UNSIZED, call, x, (sends, recvs))


def goes_unsized(call: Call, x: Tensor) -> bool:
    """Tell whether messages like ``x`` may be longer than what the receiver knows; alike on every rank.

    In checked mode the ranks agree on sizes before a call. Between hosts, and among many ranks, a
    root tells sizes in fewer steps.
    """
    if not 1 < call.size <= _MOST_UNSIZED or WATCHERS.value() is not None or not x.is_cpu:
        return False
    topology = call.group.topology or find_topology(call)
    return call.group.backend(x.device) is Backend.GLOO and len(topology.hosts) <= 1


def moves_parts(call: Call, x: Tensor, length: float) -> bool:
    """Tell whether parts of so many rows on average should travel each to its place.

    Where not, or where the algorithm cannot, a copy of what was received puts them in order.
    """
    if call.size == 1 or length * _row_elements(x) * x.element_size() < PART:
        return False
    return choose(_situation(_ALL_TO_ALL, call, x, (0, 0, False))).run in MOVE_PARTS


def all_gather(call: Call, x: Tensor, counts: Sequence[int]) -> Tensor:
    """Every rank's block, in rank order, on every rank."""
    return _dispatch(_ALL_GATHER, call, x, (counts,))


def reduce_scatter(call: Call, x: Tensor, counts: Sequence[int]) -> Tensor:
    """Block ``r`` of ``x``, summed over ranks, on rank ``r``."""
    return _dispatch(_REDUCE_SCATTER, call, x, (counts,))


def overwrite(call: Call, x: Tensor, src: int) -> Callable[[], None]:
    """Start to broadcast into ``x`` itself; the result waits for it. Other calls may start before.

    What ``x`` held is gone, except on ``src``.
    """
    if WATCHERS.value() is None and call_queue.is_free(call.group.queue):
        return _start_overwriting(call, x, src)

    def run() -> Tensor:
        _start_overwriting(call, x, src)()
        return x

    _in_turn(_BROADCAST, call, run, x, src)
    return lambda: None


def _start_overwriting(call: Call, x: Tensor, src: int) -> Callable[[], None]:
    call.group.calls += 1
    call.group.doing = "broadcast", src
    if not observers.is_observed() or call.size == 1:
        return eager.start_overwriting(call, x, src)
    begin = partial(eager.start_overwriting, call, x, src)
    return observers.start("broadcast", "backend", src, call, x, begin)


def _dispatch(operation: _Operation, call: Call, x: Tensor, args: tuple[Any, ...]) -> Tensor:
    if call.size == 1:
        return operation.alone(call, x, *args)
    if WATCHERS.in_use or QUEUES.pending:
        return _in_turn(operation, call, partial(_run, operation, call, x, args), x, *args)
    return _run(operation, call, x, args)


def _run(operation: _Operation, call: Call, x: Tensor, args: tuple[Any, ...]) -> Tensor:
    """Choose an algorithm and run it."""
    group = call.group
    group.calls += 1
    root = args[0] if operation.rooted else -1
    group.doing = operation.name, root
    if x.is_conj() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    if not x.is_contiguous():
        x = x.contiguous()
    if is_zero_tensor(x):
        x = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    try:
        if not x.untyped_storage().nbytes() and x.numel():
            raise _no_memory(call, x)
    except NotImplementedError:  # torch.func wraps what is made inside of it
        pass
    if operation.sizes is None:
        nbytes = x.nbytes
        sizes = nbytes, call.size * nbytes, True
    else:
        sizes = operation.sizes(call, x, *args)
    key = operation.name, group, x.dtype, x.device, sizes
    choice, begun = CHOSEN.get(key), None
    if choice is None:
        if operation.adds and x.dtype in _NOT_ADDED:
            raise _cannot_add(call, x.dtype)
        if group.topology is None:
            begun = observers.prepare(operation.name, call, x, find_topology)
        found = operation.only or choose(_situation(operation, call, x, sizes))
        choice = keep_choice(key, found)
    if PROFILER[PROFILING] or LOGGER.level or begun is not None:
        return observers.run(choice, root, call, x, args, begun)
    recorder = STATE.recorder
    if recorder is None:
        return choice.run(call, x, *args)
    return recorder.record(choice, root, call, x, args)


def _no_memory(call: Call, x: Tensor) -> TensorError:
    return TensorError(
        f"{call.name}: the memory of x was freed; it has {x.numel()} elements, and none can be read.\n"
        "Allocate it first: FSDP does so in forward, allgrad.module_state.restore_storage anywhere."
    )


# Whose sums torch does not compute.
_NOT_ADDED = frozenset(
    dtype
    for dtype in DTYPES
    if dtype == torch.complex32 or (dtype.is_floating_point and dtype.itemsize == 1)
)


def _cannot_add(call: Call, dtype: torch.dtype) -> ReductionError:
    """Of a gradient: the sums that a caller asks for are refused before (reductions)."""
    name = dtype_name(dtype)
    wider = "x.to(torch.complex64)" if dtype.is_complex else "x.bfloat16() or x.float()"
    return ReductionError(
        f"{call.name}: its gradient is a sum over ranks, and torch does not compute with {name}.\n"
        f'Call it on {wider}; or with grad="none", if {name} needs no gradient.'
    )


def _situation(
    operation: _Operation, call: Call, x: Tensor, sizes: tuple[int, int, bool]
) -> Situation:
    return Situation(
        operation.name,
        call.group.backend(x.device),
        x.is_cpu,
        call.size,
        *sizes,
        x.dtype in eager.CAN_ADD,
        call.group.topology or find_topology(call),
    )


def _in_turn(
    operation: _Operation, call: Call, run: Callable[[], Tensor], x: Tensor, *args: Any
) -> Tensor:
    """Run a call after those that are pending, inside the watcher."""
    watcher = WATCHERS.value()
    if watcher is None:
        return call_queue.in_turn(run, call.group.queue)

    def watched() -> Tensor:
        with watcher(call, _wire_call(operation, x, *args)):
            return run()

    return call_queue.in_turn(watched, call.group.queue)


def _wire_call(operation: _Operation, x: Tensor, *args: Any) -> WireCall:
    about = operation.name, x.dtype, x.device
    if not operation.counts:
        return WireCall(*about, x.numel(), args[0] if operation.rooted else -1)
    width = _row_elements(x)  # pieces of other widths do not fit
    counts = ([n * width for n in by_rank] for by_rank in args[: operation.counts])
    return WireCall(*about, 0, -1, *counts)


def _unknown(*_: Any) -> tuple[int, int, bool]:
    # Without the promise a rank does not know the others' sizes, so nothing may depend on them.
    return 0, 0, False


def _by_counts(_call: Call, x: Tensor, counts: Sequence[int]) -> tuple[int, int, bool]:
    row = _row_elements(x) * x.element_size()
    largest, total = max(counts), sum(counts)
    return largest * row, total * row, largest * len(counts) == total


def _row_elements(x: Tensor) -> int:
    """How many elements there are for each step along the first dimension."""
    return 1 if x.dim() == 1 else prod(x.shape[1:])


def _copy(_call: Call, x: Tensor, *_: Any) -> Tensor:
    return x.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def _alone_reduced(call: Call, x: Tensor, scratch: bool) -> Tensor:
    return x if scratch else _copy(call, x)


_ALL_REDUCE = _Operation("all_reduce", _alone_reduced, adds=True)
_BROADCAST = _Operation("broadcast", _copy, rooted=True)
_REDUCE = _Operation("reduce", _copy, rooted=True, adds=True)
_ALL_TO_ALL = _Operation("all_to_all", _copy, _unknown, counts=2)
_ALL_TO_ALL_EQUAL = _Operation("all_to_all", _copy, counts=2)
_ALL_TO_ALL_UNSIZED = _Operation(
    "all_to_all",
    _copy,
    lambda *_: (-1, -1, False),
    only=Algorithm(
        "unsized", pairwise.all_to_all_unsized, lambda _: True, costs.pairwise_all_to_all
    ),
)
_MOST_UNSIZED = 8  # ranks
_ALL_GATHER = _Operation("all_gather", _copy, _by_counts, counts=1)
_REDUCE_SCATTER = _Operation("reduce_scatter", _copy, _by_counts, counts=1, adds=True)
