"""Messages between two ranks: start sends and receives, wait for them, explain what failed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from allgrad._core.torch_internals import functorch_active
from allgrad._wire import deadline, diagnosis, ended_ranks, wait_spec, watchdog
from allgrad._wire.codec import DTYPES
from allgrad._wire.wait_spec import nest_code
from allgrad.errors import RankRaised

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import TypeAlias

    from allgrad._wire.calls import Call
    from allgrad._wire.wait_spec import Alike

    # What is sent or received into, and the rank at the other end.
    Transfer: TypeAlias = tuple[Tensor, int]
    # Blocks that can be found by rank.
    ByRank: TypeAlias = Sequence[Tensor] | Mapping[int, Tensor]

__all__ = ["exchange", "start", "start_exchange", "start_unsized", "wait"]

_TAG = 1 << 30  # not the tag of messages that the caller may be sending meanwhile
_LOW = _TAG - 1
_OPERATIONS = {
    name: code
    for code, name in enumerate(
        ("", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce")
    )
}
_UNSIZED = len(_OPERATIONS)
_NO_ROWS = torch.zeros(1, dtype=torch.uint8, device="cpu")
_DTYPES = {dtype: code for code, dtype in enumerate(DTYPES)}


def start_unsized(
    call: Call, sends: Sequence[Transfer], recvs: Sequence[Transfer], number: int
) -> Sequence[Any]:
    """Post messages whose length the receiver does not know: what it receives into may be longer."""
    tag = _TAG | hash((_UNSIZED, number)) & _LOW  # of numbers: the same in every process
    try:
        backend = _prepared(call)
        sending = [backend.send([x], peer, tag) for x, peer in sends]
        receiving = [backend.recv([x], peer, tag) for x, peer in recvs]
    except RuntimeError as error:
        deadline.close_connections(call)
        raise diagnosis.explain(call, error, 0.0, deadline.seconds_allowed()) from error
    return receiving + sending


def start_exchange(  # noqa: PLR0917
    call: Call,
    row: tuple[torch.dtype, Sequence[int]],
    pieces: ByRank,
    blocks: ByRank,
    peers: tuple[Sequence[int], Sequence[int]],
    number: int,
    receives_first: bool = False,
) -> Sequence[Any]:
    """Post the messages of an exchange: ``pieces[r]`` to rank ``r``, whose own come into ``blocks[r]``.

    The same as ``start``, or as ``exchange``, for blocks whose rows have one dtype and shape: what the
    tags of all messages have in common is found once.
    """
    dtype, shape = row
    nest = nest_code(call.nest) if call.nest else 0
    about = hash((_DTYPES[dtype], shape, _OPERATIONS[call.group.doing[0]], number, nest))
    after, before = peers
    try:
        backend = _prepared(call)
        sends = [_tagged(pieces[to], to, about) for to in after]
        recvs = [_tagged(blocks[source], source, about, _new_byte) for source in before]
        if receives_first:
            receiving = [backend.recv([x], peer, tag) for x, peer, tag in recvs]
            sending = [backend.send([x], peer, tag) for x, peer, tag in sends]
            return [*receiving[::-1], *sending[::-1]]
        sending = [backend.send([x], peer, tag) for x, peer, tag in sends]
        return [*[backend.recv([x], peer, tag) for x, peer, tag in recvs], *sending]
    except RuntimeError as error:
        deadline.close_connections(call)
        raise diagnosis.explain(call, error, 0.0, deadline.seconds_allowed()) from error


def _tagged(
    x: Tensor, peer: int, about: int, nothing: Callable[[], Tensor] = lambda: _NO_ROWS
) -> tuple[Tensor, int, int]:
    n = x.numel()
    return x if n else nothing(), peer, _TAG | hash((about, n)) & _LOW


def _new_byte() -> Tensor:
    return torch.empty(1, dtype=torch.uint8, device="cpu")


def _prepared(call: Call) -> Any:
    """What posts the messages of this call, which is registered and watched."""
    if not (deadline.STATE.no_deadline and call.group.registered):
        deadline.prepare(call)
    if watchdog.STATE.thread is None:
        watchdog.start()
    # What is made inside torch.func is wrapped; torch's dispatcher finds the tensor inside.
    return call.group.process_group if functorch_active() else call.group.host_backend


def start(
    call: Call, sends: Sequence[Transfer], recvs: Sequence[Transfer], number: int = 0
) -> Sequence[Any]:
    """Post sends before receives; tensors without elements are not sent.

    Return receives first: when they are done, most sends are done too. The messages of an exchange
    have its number: those of another never meet them, and empty ones are sent as one byte.
    """
    about = _OPERATIONS[call.group.doing[0]], number, nest_code(call.nest) if call.nest else 0
    receiving: list[Any] = []
    sending: list[Any] = []
    try:
        backend = _prepared(call)
        for x, peer in sends:
            if x.numel():
                sending.append(backend.send([x], peer, _tag(x, about)))
            elif number:
                sending.append(backend.send([_NO_ROWS], peer, _tag(x, about)))
        for x, peer in recvs:
            if x.numel():
                receiving.append(backend.recv([x], peer, _tag(x, about)))
            elif number:
                nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
                receiving.append(backend.recv([nothing], peer, _tag(x, about)))
    except RuntimeError as error:
        deadline.close_connections(call)
        raise diagnosis.explain(call, error, 0.0, deadline.seconds_allowed()) from error
    return receiving + sending


def exchange(
    call: Call, sends: Sequence[Transfer], recvs: Sequence[Transfer], number: int = 0
) -> list[Any]:
    """Post receives before sends: Gloo announces a receive on the connection that carries the data.

    Announced after a long message in the other direction, it would wait for all of it, and the two
    directions of a link would be used one after the other.

    Return the last receives first: when they are done, most others are done, and a rank that waits
    for them wakes up once. With 4 ranks on a core that takes a tenth less processor time.
    """
    receiving = start(call, (), recvs, number)
    return [*receiving[::-1], *start(call, sends, (), number)[::-1]]


def wait(call: Call, alike: Alike | None, works: Sequence[Any]) -> None:
    """Wait for what was started; ``alike`` fits what the other ranks bring, if all is well."""
    began, group = time.monotonic(), call.group
    if not works:
        _remember_empty(call, alike)
    try:
        if deadline.STATE.no_deadline:
            group.waiting = call, alike, began
            for work in works:
                work.wait()
        else:
            if deadline.seconds_allowed() is None:  # a lockstep block listens, but has no end
                group.waiting = call, alike, began
            deadline.wait_for_all(call, works)
    except (RuntimeError, RankRaised) as error:
        group.waiting = None
        deadline.close_connections(call)
        found = watchdog.take_found(call, began)
        if found is not None:
            raise found from error
        if isinstance(error, RankRaised):
            ended_ranks.publish(error)
            raise
        waited = time.monotonic() - began
        raise diagnosis.explain(call, error, waited, deadline.seconds_allowed(), alike) from error
    finally:
        group.waiting = None


def _remember_empty(call: Call, alike: Alike | None) -> None:
    """Keep what this rank brought to a call in which it sends nothing: others may wait in it for ever."""
    if alike is None or (alike if isinstance(alike, Tensor) else alike[0]).numel():
        return
    calls = call.group.empty_calls
    if not calls or calls[-1][0] != call.group.calls:
        calls.append((call.group.calls, wait_spec.describe(call, alike)))


def _tag(x: Tensor, call: tuple[object, ...]) -> int:
    """Messages of other calls, keys, shapes or dtypes never meet, where Gloo would end the process, or add
    up bytes (test_unequal_tensors_never_meet). A number and a vector of one element are alike.
    """
    shape = x.shape
    about = _DTYPES[x.dtype], shape if len(shape) > 1 else x.numel(), call
    return _TAG | hash(about) & _LOW
