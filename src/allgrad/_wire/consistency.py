"""Checked mode: before each wire call the ranks agree on what they are about to do.

Each rank gives every other one message, whose length depends on the number of ranks alone, so that
it arrives whatever the ranks disagree on. Behind the codec's header it has: how many calls this
rank has made on this group, the operation (or "raised"), dtype, elements, src or dst + 1, a digest
of sizes that all ranks must have; then the blocks of an all_to_all: their one size + 1, or 0, and in
small groups counts sent to each rank and received from each; then the call with its details, and the
line of the program.

Where all messages are alike, none is decoded. In large groups, counts of an all_to_all that are not
all one size follow in a message of their own: each rank compares what concerns it, and tells.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import threading
import weakref
from array import array
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from allgrad._core import call_queue
from allgrad._wire import diagnosis, eager, observers
from allgrad._wire import primitives as wire
from allgrad._wire.calls import OUTSIDE, UNKNOWN_SHAPES, call_site, describe_calls, number_from
from allgrad._wire.codec import DTYPES, HEADER_WORDS, Reader, Writer
from allgrad._wire.groups import AGREEMENT, Backend
from allgrad._wire.hosts import find_topology
from allgrad.errors import AllgradError, CollectiveMismatch, ModeError, in_words, rank_table

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from torch import Tensor

    from allgrad._wire.calls import Call
    from allgrad._wire.groups import Group
    from allgrad._wire.primitives import WireCall

__all__ = ["CallSpec", "checked", "is_checking", "refuse", "report_failure"]

_TEXT = 512  # bytes of each text at most
_BLOCK = HEADER_WORDS + 6  # the word with the size of an all_to_all's blocks; counts follow
_WITH_COUNTS = 64  # ranks of a group whose messages have all counts
_OPERATIONS = (
    *("raised", "all_reduce", "broadcast", "reduce"),
    *("all_to_all", "all_gather", "reduce_scatter"),
)


@dataclass(frozen=True, slots=True)
class CallSpec:
    """What one rank is about to do.

    ``sizes``: digest of counts that are the same on every rank. ``block``: the size of all blocks of
    an all_to_all, -1 if they have several. ``send``, ``receive``: its counts, in small groups.
    """

    number: int
    operation: str
    dtype: torch.dtype
    elements: int
    root: int
    call: str
    site: str
    sizes: int = 0
    block: int = -1
    send: tuple[int, ...] = ()
    receive: tuple[int, ...] = ()

    @staticmethod
    def words(ranks: int) -> int:
        """How long a message is."""
        return _BLOCK + 3 + 2 * _TEXT // 8 + _counts(ranks)

    def encode(self, ranks: int) -> list[int]:
        writer = Writer("check")
        writer.number(self.number)
        writer.choice(self.operation, _OPERATIONS)
        writer.dtype(self.dtype)
        writer.number(self.elements, self.root + 1, self.sizes, self.block + 1)
        writer.number(*((*self.send, *self.receive) or (0,) * _counts(ranks)))
        writer.text(self.call, _TEXT)
        writer.text(self.site, _TEXT)
        return writer.padded(self.words(ranks))

    @staticmethod
    def decode(words: Sequence[int], ranks: int, sender: int) -> CallSpec:
        """Read what ``encode`` wrote, checking every number before it is used."""
        reader = Reader(words, "check", sender)
        number, operation = reader.number(), reader.choice(_OPERATIONS)
        dtype = DTYPES[reader.number(0, len(DTYPES) - 1)]
        elements, root = reader.number(), reader.number(0, ranks) - 1
        sizes, block = reader.number(), reader.number() - 1
        counts = reader.numbers(_counts(ranks))
        half = len(counts) // 2
        by_rank = (counts[:half], counts[half:]) if any(counts) else ((), ())
        call, site = reader.text(_TEXT), reader.text(_TEXT)
        about = number, operation, dtype, elements, root, call, site
        return CallSpec(*about, sizes, block, *by_rank)

    def __str__(self) -> str:
        return f"{self.call}   {self.site}"


def _counts(ranks: int) -> int:
    """How many counts a message has."""
    return 2 * ranks if ranks <= _WITH_COUNTS else 0


class _State:
    """How many calls each group has seen."""

    def __init__(self) -> None:
        self.calls: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        # A check and its call stay together when several threads use one group. Threads with
        # groups of their own must not wait for each other (test_threads_with_their_own_groups).
        self.locks: weakref.WeakKeyDictionary[Any, threading.RLock] = weakref.WeakKeyDictionary()
        self.guard = threading.Lock()

    def lock(self, call: Call) -> threading.RLock:
        with self.guard:
            return self.locks.setdefault(call.group, threading.RLock())


_STATE = _State()


@contextlib.contextmanager
def checked(*, sites: bool = True) -> Generator[None]:
    """Within this block the ranks agree before each wire call, forward and backward.

    They compare operation, reduction, dtype, shapes, sizes, the number of calls so far and the
    line of the program. On a difference every rank raises ``CollectiveMismatch`` before any data
    moves, with a table of what each was about to do; the group can be used afterwards.

    ``sites=False`` lets ranks make the same call from different lines. ``ALLGRAD_CHECK=1`` in the
    environment checks the whole program. Check on every rank or on none.

    Cost: one small message more for each call.
    """
    if torch.compiler.is_compiling():
        raise ModeError(
            "checked: a block cannot be compiled.\nCall the compiled function inside it."
        )
    describe_calls(True)
    try:
        with wire.WATCHERS.open(partial(_agree_first, sites)):
            yield
    finally:
        describe_calls(False)


def is_checking() -> bool:
    return wire.WATCHERS.value() is not None


@contextlib.contextmanager
def _agree_first(sites: bool, call: Call, planned: WireCall) -> Generator[None]:
    with _STATE.lock(call):
        in_backward = call_queue.in_backward()
        now = call_site()
        site = f"{call.site}, from {now}" if in_backward and now != call.site else call.site
        text = f"{call.name}({call.details})"
        mine = CallSpec(
            _STATE.calls.get(call.group, 0),
            planned.operation,
            planned.dtype,
            planned.elements,
            planned.root,
            f"{_backward_of(call.serial)}{text}" if in_backward else text,
            site or now,
            *_blocks(call, planned),
        )
        try:
            _agree(call, mine, planned.device, planned, sites)
            yield
        except BaseException as error:
            if isinstance(error, CollectiveMismatch):
                observers.refuse(call, planned, error)
            diagnosis.mark_inside_call(error)
            raise


def _blocks(call: Call, planned: WireCall) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    """What a message tells of counts: digest, one size, counts sent and received."""
    send, receive = planned.send, planned.receive
    if planned.operation != "all_to_all":
        return _digest(send) if send else 0, -1, (), ()
    n = send[0]
    alike = list(send).count(n) == len(send) and list(receive).count(n) == len(receive)
    by_rank = (tuple(send), tuple(receive)) if _counts(call.size) else ((), ())
    return 0, n if alike else -1, *by_rank


def _digest(counts: Sequence[int]) -> int:
    found = hashlib.blake2b(array("q", counts).tobytes(), digest_size=8).digest()
    return int.from_bytes(found, "little") >> 1


_BACKWARD = "backward of "
_NUMBERED = re.compile(r"backward of collective \d+, ")
_SHAPES = re.compile(rf"({UNKNOWN_SHAPES}|\([^()]*\) \w+(; \([^()]*\) \w+)*)\)$")


def _backward_of(serial: int) -> str:
    # In backward a compiled call knows neither its number nor the shapes that it had forward.
    return f"backward of collective {serial}, " if serial else _BACKWARD


def _comparable(specs: Sequence[CallSpec]) -> list[CallSpec]:
    """The specs, without the numbers of calls in backward, the shapes and the lines where some rank does
    not know them, being compiled; the number of elements is compared all the same.
    """
    if any(spec.site.startswith(OUTSIDE) for spec in specs):
        specs = [replace(spec, site="") for spec in specs]
    texts = [spec.call for spec in specs]
    if not any(
        text.endswith(f"{UNKNOWN_SHAPES})")
        or (text.startswith(_BACKWARD) and not _NUMBERED.match(text))
        for text in texts
    ):
        return list(specs)
    known = (_NUMBERED.sub(_BACKWARD, text, count=1) for text in texts)
    return [
        replace(spec, call=_SHAPES.sub("", text)) for spec, text in zip(specs, known, strict=True)
    ]


def refuse(call: Call, error: Exception) -> NoReturn:
    """Raise what is wrong on this rank, before it sends anything of this call.

    In checked mode the others, who come to this call, raise too, and name this rank.
    """
    if is_checking() and call.size > 1 and not torch.compiler.is_compiling():
        report_failure(call, error)
    raise error


def report_failure(call: Call, error: BaseException) -> None:
    """Answer the other ranks' next check with the error that ended this one."""
    about = in_words(error), call_site()

    def answer() -> None:
        with _STATE.lock(call):
            number = _STATE.calls.get(call.group, 0)
            mine = CallSpec(number, "raised", torch.int64, 0, -1, *about)
            _agree(call, mine, torch.device("cpu"))

    call_queue.in_turn(answer, call.group.queue)
    diagnosis.mark_known(error, call)


def _agree(
    call: Call,
    mine: CallSpec,
    device: torch.device,
    planned: WireCall | None = None,
    sites: bool = True,
) -> None:
    """Compare this rank's next call with all others'; what has been counted until then may differ."""
    try:
        agreed = _compared(call, mine, device, planned, sites)
    except AllgradError:
        _begin_anew(call.group)
        raise
    if agreed is None:
        _begin_anew(call.group)
    else:
        diagnosis.remember_agreed(call, agreed)


def _begin_anew(group: Group) -> None:
    """After a difference that all ranks have seen (test_the_group_can_be_used_after_a_caught_error)."""
    number_from(group, _STATE.calls.get(group, 0))
    group.disagreements += 1


def _compared(
    call: Call, mine: CallSpec, device: torch.device, planned: WireCall | None, sites: bool
) -> list[str] | None:
    """What each rank is about to do; ``None`` if this one has raised."""
    # Counted as a call: other ranks may still wait in the one before (test_late_between_checks).
    call.group.calls += 1
    call.group.doing = AGREEMENT, -1
    row = torch.tensor(mine.encode(call.size), dtype=torch.int64, device="cpu")
    rows = _gathered(call, row, device)
    different = rows != row
    different[:, _BLOCK : _BLOCK + 1 + _counts(call.size)] = False
    if not different.any() and mine.operation != "raised":
        _STATE.calls[call.group] = mine.number + 1
        by_rank = [str(mine)] * call.size
        specs = None
    else:
        specs = [CallSpec.decode(words, call.size, r) for r, words in enumerate(rows.tolist())]
        _STATE.calls[call.group] = max(spec.number for spec in specs) + 1
        raised = [rank for rank, spec in enumerate(specs) if spec.operation == "raised"]
        if raised:
            if mine.operation != "raised":
                raise diagnosis.raised_on(call, raised[0], specs[raised[0]].call)
            return None
        _compare(call, specs, sites)
        by_rank = [str(spec) for spec in specs]
    if planned is not None and mine.operation == "all_to_all":
        marks = _misfits(call, rows, planned, device)
        if marks:
            raise _mismatch(call, specs or [mine] * call.size, marks)
    return by_rank


def _gathered(call: Call, row: Tensor, device: torch.device) -> Tensor:
    """Every rank's row. On Gloo copies are faster; elsewhere they would connect all with all."""
    # The first message of a group is this one, checked or not: Gloo ends the process where an all_to_all
    # meets one of another length (test_checks_on_one_rank_from_the_first_call_on).
    find_topology(call)
    counts, own = (len(row),) * call.size, row.to(call.group.message_device(device))
    gloo = call.group.backend(own.device) is Backend.GLOO
    gather = eager.all_gather_by_copies if gloo else eager.all_gather
    return gather(call, own, counts).cpu().view(call.size, len(row))


def _misfits(call: Call, rows: Tensor, planned: WireCall, device: torch.device) -> dict[int, str]:
    """Ranks to which some rank sends another number of elements than they expect."""
    blocks = rows[:, _BLOCK]
    if int(blocks[0]) and bool((blocks == blocks[0]).all()):
        return {}
    size = call.size
    if _counts(size):
        counts = rows[:, _BLOCK + 1 :]
        sent, expected = counts[:, :size].t(), counts[:, size : 2 * size]
        wrong = (sent != expected).nonzero().tolist()
        found = [
            (to, source, int(sent[to, source]), int(expected[to, source])) for to, source in wrong
        ]
    else:
        where = call.group.message_device(device)
        by_rank = torch.tensor(planned.send, dtype=torch.int64, device=where)
        coming = eager.all_to_all_equal(call, by_rank).cpu()
        expected = torch.tensor(planned.receive, dtype=torch.int64, device="cpu")
        own = (coming != expected).nonzero().flatten().tolist()[-1:]
        told = [(source, int(coming[source]), int(expected[source])) for source in own]
        verdict = torch.tensor(told[0] if told else (-1, 0, 0), dtype=torch.int64, device="cpu")
        verdicts = _gathered(call, verdict, device).tolist()
        found = [(to, *told) for to, told in enumerate(verdicts) if told[0] >= 0]
    return {
        to: f"expects {expects} from rank {source}, which sends {sends}"
        for to, source, sends, expects in found
    }


_COMPARED: tuple[tuple[Callable[[CallSpec], object], str], ...] = (
    (lambda s: s.number, "has made another number of calls"),
    (lambda s: s.operation, "another call"),
    (lambda s: s.call, "another call"),
    (lambda s: s.dtype, "another dtype"),
    (lambda s: s.root, "another src or dst"),
    (lambda s: s.elements, "another shape"),
    (lambda s: s.sizes, "other sizes"),
    # Not from where backward came: a call that waits behind async ones runs on another thread.
    (lambda s: s.site.partition(", from ")[0], "another line"),
)


def _compare(call: Call, specs: list[CallSpec], sites: bool) -> None:
    compared = _comparable(specs)
    for value, words in _COMPARED if sites else _COMPARED[:-1]:
        values = [value(spec) for spec in compared]
        if any(one != values[0] for one in values):
            usual = Counter(values).most_common(1)[0][0]
            odd = {rank: words for rank, one in enumerate(values) if one != usual}
            raise _mismatch(call, specs, odd)


def _mismatch(call: Call, specs: Sequence[CallSpec], marks: dict[int, str]) -> CollectiveMismatch:
    return CollectiveMismatch(
        rank_table(
            f"{call.name}: the ranks were about to do different things; nothing was sent.",
            [f"call {spec.number}: {spec}" for spec in specs],
            marks,
            "Make every rank of the group call the same collectives in the same order.",
        )
    )


_OFF = {"", "0", "false", "no", "off"}
_WHOLE_PROGRAM = os.environ.get("ALLGRAD_CHECK", "").lower() not in _OFF
wire.WATCHERS.set_outside(partial(_agree_first, True) if _WHOLE_PROGRAM else None)
if _WHOLE_PROGRAM:
    describe_calls(True)
