"""``sync``: give every rank the state of one rank."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import MutableMapping
from numbers import Real
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from allgrad._wire import primitives as wire
from allgrad.collectives._inputs import as_rank
from allgrad.errors import GroupError, InputError, TensorError
from allgrad.module_state._buckets import Bucket, buckets
from allgrad.module_state._differences import differences, mismatch
from allgrad.module_state._entries import (
    Entry,
    State,
    assign_settings,
    drop_ignored,
    entries,
    tensors_and_others,
)
from allgrad.module_state._exchange import StateExchange
from allgrad.module_state._in_eager import in_eager
from allgrad.module_state._messages import decode_settings, encode_settings
from allgrad.module_state._specs import (
    EntrySpec,
    all_plain,
    device_names,
    entry_spec,
    local_piece,
    spec_summary,
    why_unreadable,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from allgrad._wire.primitives import GroupLike

__all__ = ["sync"]

_THE_CALL = "the call"
_MIB = 2**20
_BUCKETS_AT_ONCE = 2


@in_eager
@torch.inference_mode()  # views are cheaper to make than under no_grad
def sync(
    module: State,
    src: int = 0,
    *,
    group: GroupLike = None,
    ignore: Iterable[str] = (),
    buffers: bool = True,
    bucket_mb: float = 4,
) -> None:
    """Give every rank the state of ``src``: the values of all parameters and buffers.

        rank 0   weight A  bias a              weight A  bias a
        rank 1   weight B  bias b     --->     weight A  bias a
        rank 2   weight C  bias c              weight A  bias a

    Values are written in place, bit for bit; strides, ``requires_grad`` and ``grad`` do not change.
    Buffers that are not persistent are written too. A tensor under several names is sent once. Tensors
    that share a part of their memory, such as ``x[:2]`` and ``x[1:3]``, must do so on ``src`` too: others
    would be written over each other.

    ``module`` may also be an optimizer, or a dict of tensors by name. Of an optimizer, the settings
    are sent too, and those in a dict: None, strings, and integers, floating-point numbers and booleans
    of Python and NumPy, in the type that ``src`` has. Other objects in it (functions, dtypes, complex numbers)
    are not sent: each rank keeps its own. A DTensor is synced if all ranks of the group hold the same piece of it.

    ``ignore`` names parameters, buffers or whole submodules; ``buffers=False`` leaves out all
    buffers.

    Before any value is sent, the ranks compare what they hold: if a name, shape, dtype, device type
    or argument differs, every rank raises ``StateMismatch`` and no rank is changed.

    Cost: one small message, then one broadcast for each ``bucket_mb`` MiB of tensors of all dtypes,
    two broadcasts at a time. A larger tensor has a broadcast of its own, without a copy. The
    settings of an optimizer take one more message.
    """
    held: list[Entry] = []
    problem: InputError | None = None
    limit = 0
    try:
        limit = _bytes_of_bucket(bucket_mb)
        everything = entries("sync", module)
        kept = drop_ignored("sync", module, everything, ignore)
        held = kept if buffers else [entry for entry in kept if entry.kind != "buffer"]
        _require_values(held)
    except InputError as error:
        problem = error
    exchange = StateExchange.open("sync", group, held)
    try:
        src = as_rank("sync", exchange.call, "src", src)
    except GroupError as error:
        problem = problem or error
    call = f"sync, src={src}, bucket of {limit} bytes"
    _require_same(exchange, call, [] if problem else held, problem)
    if exchange.call.size > 1:
        _send_tensors(exchange, src, held, limit)
        _send_settings(exchange, src, module, held)


def _bytes_of_bucket(bucket_mb: object) -> int:
    number = isinstance(bucket_mb, Real) and not isinstance(bucket_mb, bool)
    if not number or not 0 < bucket_mb < math.inf:  # type: ignore[operator]
        raise InputError(
            f"sync: bucket_mb={bucket_mb!r} is not a size.\nGive the size of one message in MiB, for example 4."
        )
    return max(1, int(bucket_mb * _MIB))  # type: ignore[operator]


def _require_values(held: Sequence[Entry]) -> None:
    tensors, _ = tensors_and_others(held)
    if all_plain([entry.value for entry in tensors]):
        return
    reasons: dict[str, list[str]] = {}
    for entry in tensors:
        if reason := why_unreadable(entry.value, writing=True):
            reasons.setdefault(reason, []).append(entry.name)
    for reason, names in reasons.items():
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        raise TensorError(
            f"sync: {', '.join(names[:8])}{more}: {reason}.\n"
            "Give every rank dense tensors with memory of their own, or name these in ignore."
        )


def _require_same(
    exchange: StateExchange, call: str, held: Sequence[Entry], problem: InputError | None
) -> None:
    """Raise on every rank unless all ranks make the same call with the same entries."""

    def specs() -> dict[str, EntrySpec]:
        devices = device_names(e.value.device for e in tensors_and_others(held)[0])
        found = {_THE_CALL: EntrySpec(call)}
        for entry in held:
            device = devices[entry.value.device] if isinstance(entry.value, Tensor) else ""
            found[entry.name] = entry_spec(entry, device=device)
        return found

    by_rank = exchange.compare(f"{call}\n{spec_summary(held)}", specs, problem)
    if by_rank is None:
        return
    # A rank that makes another call sends no such entry.
    calls = differences(
        [{_THE_CALL: found[_THE_CALL]} if _THE_CALL in found else {} for found in by_rank]
    )
    raise mismatch(
        "sync: every rank must call it with the same arguments and hold the same names, shapes "
        "and dtypes",
        calls or differences(by_rank),
        "Build the same state on every rank before the call, or name what differs in ignore.",
    )


def _send_tensors(exchange: StateExchange, src: int, held: Sequence[Entry], limit: int) -> None:
    """Send two buckets at a time: while one is sent, the next is packed and the last unpacked."""
    tensors, _ = tensors_and_others(held)
    pieces = [local_piece(entry.value) for entry in tensors if not entry.tied]
    all_buckets = buckets(pieces, limit)
    memory = _Memory(max((b.nbytes for b in all_buckets if b.in_place() is None), default=0))
    pending: deque[Callable[[], None]] = deque()
    for bucket in all_buckets:
        if len(pending) == _BUCKETS_AT_ONCE:
            pending.popleft()()
        pending.append(_start(exchange, src, bucket, memory))
    for finish in pending:
        finish()


class _Memory:
    """Memory for the pending buckets, reused when a bucket is done."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._blocks: defaultdict[torch.device, deque[Tensor]] = defaultdict(deque)

    def take(self, bucket: Bucket) -> Tensor:
        blocks = self._blocks[bucket.device]
        if len(blocks) < _BUCKETS_AT_ONCE:
            blocks.append(torch.empty(self._nbytes, dtype=torch.uint8, device=bucket.device))
        else:
            blocks.rotate()
        return blocks[-1][: bucket.nbytes]


def _start(
    exchange: StateExchange, src: int, bucket: Bucket, memory: _Memory
) -> Callable[[], None]:
    """Start to send a bucket; return the function that waits for it."""
    receives, in_place = exchange.call.rank != src, bucket.in_place()
    flat = memory.take(bucket) if in_place is None else in_place
    if in_place is None and not receives:  # only src is read
        bucket.pack(flat)
    message = flat if _can_send(exchange.call, flat.device) else flat.to(exchange.device)
    wait = wire.overwrite(exchange.call, message, src)

    def finish() -> None:
        wait()
        if not receives:
            return
        flat.copy_(message)  # no copy if they are one tensor
        if in_place is None:
            bucket.unpack(flat)
        else:
            torch.autograd.graph.increment_version(bucket.tensors)

    return finish


def _can_send(call: wire.Call, device: torch.device) -> bool:
    try:
        call.group.backend(device)
    except GroupError:
        return False
    return True


def _send_settings(exchange: StateExchange, src: int, state: State, held: Sequence[Entry]) -> None:
    settings = [entry for entry in held if entry.kind == "setting"]
    if not settings or not isinstance(state, (Optimizer, MutableMapping)):
        return
    message = exchange.from_rank(src, encode_settings([entry.value for entry in settings]))
    if exchange.call.rank != src:
        values = decode_settings(message, src, len(settings))
        names = [entry.name for entry in settings]
        if isinstance(state, Optimizer):
            assign_settings(state, dict(zip(names, values, strict=True)))
        else:
            state.update(zip(names, values, strict=True))
