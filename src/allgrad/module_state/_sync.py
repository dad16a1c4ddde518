"""``sync``: every rank ends with the state of one of them."""

from __future__ import annotations

import json
import math
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from allgrad._wire import primitives as wire
from allgrad.collectives._inputs import check_rank
from allgrad.errors import AllgradError, GroupError, InputError, TensorError
from allgrad.module_state._buckets import Bucket, buckets
from allgrad.module_state._differences import differences, mismatch, read, write
from allgrad.module_state._entries import (
    Entry,
    Setting,
    State,
    assign_settings,
    entries,
    tensors_and_others,
    without,
)
from allgrad.module_state._specs import (
    Facts,
    all_usual,
    device_words,
    facts,
    hindrance,
    local_piece,
    outline,
)
from allgrad.module_state._text_exchange import Line, open_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from allgrad._wire.primitives import GroupLike

__all__ = ["sync"]

_THE_CALL = "the call"
_MIB = 2**20
_AT_ONCE = 2


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
    """Give every rank the state that ``src`` has: the values of all parameters and buffers.

        rank 0   weight A  bias a              weight A  bias a
        rank 1   weight B  bias b     --->     weight A  bias a
        rank 2   weight C  bias c              weight A  bias a

    Values are written in place, bit for bit; strides, ``requires_grad`` and ``grad`` stay. Buffers
    that are not persistent are written too. A weight under several names is sent once.

    ``module`` may also be an optimizer, whose numbers, texts and None are sent too, or a dict of
    tensors by name. Of a DTensor the local pieces are sent, if all ranks of the group hold the
    same piece.

    ``ignore`` names parameters and buffers, or submodules for all they hold; ``buffers=False``
    leaves out all buffers.

    Before any value moves the ranks compare what they hold: if a name, shape, dtype, kind of
    device or argument differs, every rank raises ``StateMismatch`` and no rank is changed.

    Cost: one small message, then one broadcast for each ``bucket_mb`` MiB, tensors of all dtypes
    together, two at once. A larger tensor travels alone, from its memory to its memory. An
    optimizer's settings take one message more.
    """
    held: list[Entry] = []
    problem: InputError | None = None
    limit = 0
    try:
        limit = _bytes_of_bucket(bucket_mb)
        everything = entries("sync", module)
        kept = without("sync", module, everything, ignore)
        held = kept if buffers else [entry for entry in kept if entry.kind != "buffer"]
        _require_values(held)
    except InputError as error:
        problem = error
    line = open_line("sync", group, held)
    try:
        src = check_rank("sync", line.ranks, "src", src)
    except GroupError as error:
        problem = problem or error
    call = f"sync, src={src}, bucket of {limit} bytes"
    _agree(line, call, [] if problem else held, problem)
    if line.ranks.size > 1:
        _send_tensors(line, src, held, limit)
        _send_settings(line, src, module, held)


def _bytes_of_bucket(bucket_mb: object) -> int:
    number = isinstance(bucket_mb, (int, float)) and not isinstance(bucket_mb, bool)
    if not number or not 0 < bucket_mb < math.inf:  # type: ignore[operator]
        raise InputError(
            f"sync: bucket_mb={bucket_mb!r} is not a size.\nGive the MiB of one message, as 4."
        )
    return max(1, int(bucket_mb * _MIB))  # type: ignore[operator]


def _require_values(held: Sequence[Entry]) -> None:
    tensors, _ = tensors_and_others(held)
    if all_usual([entry.value for entry in tensors]):
        return
    reasons: dict[str, list[str]] = {}
    for entry in tensors:
        if why := hindrance(entry.value, writing=True):
            reasons.setdefault(why, []).append(entry.name)
    for why, names in reasons.items():
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        raise TensorError(
            f"sync: {', '.join(names[:8])}{more}: {why}.\n"
            "Give every rank dense tensors with memory of their own, or name these in ignore."
        )


def _agree(line: Line, call: str, held: Sequence[Entry], problem: InputError | None) -> None:
    """Let every rank raise unless all of them brought the same."""

    def text() -> str:
        devices = device_words(e.value.device for e in tensors_and_others(held)[0])
        said = {_THE_CALL: Facts(call)}
        for entry in held:
            device = devices[entry.value.device] if isinstance(entry.value, Tensor) else ""
            said[entry.name] = facts(entry, device=device)
        return write(said)

    texts = line.compare(f"{call}\n{outline(held)}", text, problem)
    if texts is None:
        return
    heard = [read(text) for text in texts]
    calls = differences(
        [{name: f for name, f in one.items() if name == _THE_CALL} for one in heard]
    )
    raise mismatch(
        "sync: every rank must call it with the same arguments and hold the same names, shapes "
        "and dtypes",
        calls or differences(heard),
        "Build the same state on every rank before the call, or name what differs in ignore.",
    )


def _send_tensors(line: Line, src: int, held: Sequence[Entry], limit: int) -> None:
    """Send the buckets, two at once: while one travels the next is packed and the last unpacked."""
    tensors, _ = tensors_and_others(held)
    own = [local_piece(entry.value) for entry in tensors if not entry.tied]
    all_buckets = buckets(own, limit)
    packed = _Memory(max((b.nbytes for b in all_buckets if b.in_place() is None), default=0))
    under_way: deque[Callable[[], None]] = deque()
    for bucket in all_buckets:
        if len(under_way) == _AT_ONCE:
            under_way.popleft()()
        under_way.append(_start(line, src, bucket, packed))
    for finish in under_way:
        finish()


class _Memory:
    """Memory for the buckets under way, used again when they have arrived."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._turns: defaultdict[torch.device, deque[Tensor]] = defaultdict(deque)

    def take(self, bucket: Bucket) -> Tensor:
        turns = self._turns[bucket.device]
        if len(turns) < _AT_ONCE:
            turns.append(torch.empty(self._most, dtype=torch.uint8, device=bucket.device))
        else:
            turns.rotate()
        return turns[-1][: bucket.nbytes]


def _start(line: Line, src: int, bucket: Bucket, packed: _Memory) -> Callable[[], None]:
    """Start to send a bucket; give what ends it."""
    receives, alone = line.ranks.rank != src, bucket.in_place()
    flat = packed.take(bucket) if alone is None else alone
    if alone is None and not receives:  # what the others pass is not read
        bucket.pack(flat)
    carried = flat if _carries(line, flat.device) else flat.to(line.device)
    wait = wire.overwrite(line.ranks, carried, src)

    def finish() -> None:
        wait()
        if not receives:
            return
        flat.copy_(carried)  # nothing happens if they are the same
        if alone is None:
            bucket.unpack(flat)
        else:
            torch.autograd.graph.increment_version(bucket.tensors)

    return finish


def _carries(line: Line, device: torch.device) -> bool:
    try:
        line.ranks.group.backend(device)
    except GroupError:
        return False
    return True


def _send_settings(line: Line, src: int, state: State, held: Sequence[Entry]) -> None:
    settings = [entry for entry in held if entry.kind == "setting"]
    if not settings or not isinstance(state, Optimizer):
        return
    text = line.from_rank(src, json.dumps([entry.value for entry in settings]))
    if line.ranks.rank != src:
        values = _read_settings(text, len(settings))
        names = [entry.name for entry in settings]
        assign_settings(state, dict(zip(names, values, strict=True)))


def _read_settings(text: str, count: int) -> list[Setting]:
    try:
        values: Any = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    good = isinstance(values, list) and len(values) == count
    if not good or not all(v is None or isinstance(v, (int, float, str)) for v in values):
        raise AllgradError("sync: the settings that came from src are garbled.")
    return values  # type: ignore[no-any-return]
