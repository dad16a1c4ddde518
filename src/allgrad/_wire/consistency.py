"""Checked mode: before each wire call the ranks agree on what they are about to do.

Each rank sends every other one message of fixed, versioned layout, whose length depends on the
number of ranks alone, so that it arrives whatever the ranks disagree on. In words of 64 bits:

    word  0          layout version
          1          how many calls this rank has made on this group
          2          the wire call's number, or 0 for "I ended with an error"
          3          dtype's number
          4          elements, where all ranks have as many
          5          src or dst, + 1
          6, 7       bytes of the two texts
          8 - 71     the call: its name and facts, or the error
         72 - 135    where in the program
        136 - ...    counts sent to each rank, then received from each

Nothing received is ever unpickled or evaluated.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from allgrad._core import call_queue as departures
from allgrad._wire import deadline as waiting
from allgrad._wire import primitives as wire
from allgrad._wire.groups import call_site, describe_calls
from allgrad._wire.handshake import DTYPES, text_fitting, text_of, text_words
from allgrad.errors import AllgradError, CollectiveMismatch, ModeError, rank_table

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from allgrad._wire.primitives import Group, Planned

__all__ = ["Intent", "checked", "is_checking", "tell_failure"]

VERSION = 1
_TEXT_WORDS = 64
_FIXED = 8
_HEAD = _FIXED + 2 * _TEXT_WORDS
_OPS = ("raised", "all_reduce", "broadcast", "reduce", "all_to_all", "all_gather", "reduce_scatter")


@dataclass(frozen=True, slots=True)
class Intent:
    """What one rank is about to do."""

    number: int
    op: str
    dtype: torch.dtype
    elements: int
    root: int
    call: str
    site: str
    send: tuple[int, ...]
    receive: tuple[int, ...]

    def encode(self, ranks: int) -> list[int]:
        call = text_fitting(self.call, _TEXT_WORDS * 8)
        site = text_fitting(self.site, _TEXT_WORDS * 8)
        fixed = [VERSION, self.number, _OPS.index(self.op), DTYPES.index(self.dtype)]
        fixed += [self.elements, self.root + 1, len(call), len(site)]
        texts = [*text_words(call, _TEXT_WORDS), *text_words(site, _TEXT_WORDS)]
        counts = [*(self.send or (0,) * ranks), *(self.receive or (0,) * ranks)]
        return [*fixed, *texts, *counts]

    @staticmethod
    def decode(words: Sequence[int], ranks: int) -> Intent:
        """Read what ``encode`` wrote, checking every number before it is used."""
        if len(words) != _HEAD + 2 * ranks:
            raise AllgradError(f"A check of {len(words)} words came; expected {_HEAD + 2 * ranks}.")
        version, number, op, dtype, elements, root, call, site = words[:_FIXED]
        if version != VERSION:
            raise AllgradError(
                f"A rank speaks version {version} of this check, this one {VERSION}.\n"
                "Check calls on every rank or on none, with the same allgrad."
            )
        counts = words[_HEAD:]
        if (
            number < 0
            or not 0 <= op < len(_OPS)
            or not 0 <= dtype < len(DTYPES)
            or elements < 0
            or not 0 <= root <= ranks
            or not 0 <= call <= _TEXT_WORDS * 8
            or not 0 <= site <= _TEXT_WORDS * 8
            or any(count < 0 for count in counts)
        ):
            raise AllgradError("A check from another rank is garbled: a number is out of range.")
        return Intent(
            number,
            _OPS[op],
            DTYPES[dtype],
            elements,
            root - 1,
            text_of(words[_FIXED : _FIXED + _TEXT_WORDS], call),
            text_of(words[_FIXED + _TEXT_WORDS : _HEAD], site),
            tuple(counts[:ranks]),
            tuple(counts[ranks:]),
        )

    def __str__(self) -> str:
        return f"{self.call}   {self.site}"


class _State:
    """Who wants checks, and how many calls each group has seen."""

    def __init__(self) -> None:
        self.depth = 0
        self.compare_sites = True
        self.calls: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        # Calls from several threads keep their checks and their data together.
        self.lock = threading.RLock()


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
    before = _STATE.compare_sites
    _switch(on=True)
    _STATE.compare_sites = sites
    try:
        yield
    finally:
        _STATE.compare_sites = before
        _switch(on=False)


def is_checking() -> bool:
    return _STATE.depth > 0


def _switch(*, on: bool) -> None:
    _STATE.depth += 1 if on else -1
    describe_calls(on)
    wire.watch(_agree_first if _STATE.depth else None)


if os.environ.get("ALLGRAD_CHECK", "0") not in {"", "0"}:
    _switch(on=True)


@contextlib.contextmanager
def _agree_first(group: Group, planned: Planned) -> Generator[None]:
    with _STATE.lock:
        in_backward = departures.in_backward()
        now = call_site()
        site = f"{group.site}, from {now}" if in_backward and now != group.site else group.site
        call = f"{group.call}({group.facts})"
        mine = Intent(
            _STATE.calls.get(group.process_group, 0),
            planned.op,
            planned.dtype,
            planned.elements,
            planned.root,
            f"{_backward_of(group.serial)}{call}" if in_backward else call,
            site or now,
            tuple(planned.send),
            tuple(planned.receive),
        )
        _agree(group, mine, planned.device)
        yield


def _backward_of(serial: int) -> str:
    """A compiled call does not know in backward which one it was forward: its number is 0."""
    return f"backward of collective {serial}, " if serial else _BACKWARD


_BACKWARD = "backward of "
_NUMBERED = re.compile(r"backward of collective \d+, ")


def _alike_numbered(calls: Sequence[str]) -> list[str]:
    """The calls without their numbers in backward, where some rank does not know them."""
    unnumbered = any(c.startswith(_BACKWARD) and not _NUMBERED.match(c) for c in calls)
    return [_NUMBERED.sub(_BACKWARD, c, count=1) for c in calls] if unnumbered else list(calls)


def tell_failure(group: Group, error: BaseException) -> None:
    """Answer the other ranks' next check with the error that ended this one."""
    text = f"{type(error).__name__}: {error}"
    number = _STATE.calls.get(group.process_group, 0)
    mine = Intent(number, "raised", torch.int64, 0, -1, text, call_site(), (), ())
    with _STATE.lock:
        _agree(group, mine, torch.device("cpu"))


def _agree(group: Group, mine: Intent, device: torch.device) -> None:
    words = mine.encode(group.size)
    each = [len(words)] * group.size
    heard = wire.send_words(group, words * group.size, each, each, device)
    rows = [heard[i : i + len(words)] for i in range(0, len(heard), len(words))]
    intents = [Intent.decode(row, group.size) for row in rows]
    _STATE.calls[group.process_group] = max(intent.number for intent in intents) + 1
    raised = [rank for rank, intent in enumerate(intents) if intent.op == "raised"]
    if raised:
        if mine.op != "raised":
            raise waiting.raised_on(group, raised[0], intents[raised[0]].call)
        return
    _compare(group, intents)
    for rank, intent in enumerate(intents):
        waiting.remember(group, rank, str(intent))


def _compare(group: Group, intents: list[Intent]) -> None:
    calls = _alike_numbered([intent.call for intent in intents])
    compared = [replace(intent, call=call) for intent, call in zip(intents, calls, strict=True)]

    def differing(what: Callable[[Intent], object], how: str) -> dict[int, str]:
        values = [what(intent) for intent in compared]
        usual = max(values, key=values.count)
        return {rank: how for rank, value in enumerate(values) if value != usual}

    marks: dict[int, str] = {}
    for what, how in (
        (lambda i: i.number, "has made another number of calls"),
        (lambda i: i.op, "another call"),
        (lambda i: i.call, "another call"),
        (lambda i: i.dtype, "another dtype"),
        (lambda i: i.root, "another src or dst"),
        (lambda i: i.elements, "another shape"),
        (lambda i: i.send if i.op in {"all_gather", "reduce_scatter"} else (), "other sizes"),
        (lambda i: i.site if _STATE.compare_sites else "", "another line"),
    ):
        marks = marks or differing(what, how)
    if not marks:
        marks = {
            b: f"expects {intents[b].receive[a]} from rank {a}, which sends {intents[a].send[b]}"
            for a in range(len(intents))
            for b in range(len(intents))
            if intents[a].op == "all_to_all" and intents[a].send[b] != intents[b].receive[a]
        }
    if marks:
        rows = [f"call {intent.number}: {intent}" for intent in intents]
        raise CollectiveMismatch(
            rank_table(
                f"{group.call}: the ranks were about to do different things; nothing was sent.",
                rows,
                marks,
                "Make every rank of the group call the same collectives in the same order.",
            )
        )
