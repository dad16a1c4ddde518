"""A watchdog for waits without a deadline: it ends those of ranks that are in different calls.

Messages of other shapes or dtypes never meet (``messages``), so ranks that bring such tensors to
one call wait for each other; so do ranks that call different collectives, or name another src or dst.
A thread of each process looks once a second. While this rank waits in a group, it writes into the group's store
which call that is and what the rank brought, and reads what some other ranks wrote. A difference in the
call of the same number ends the wait, on every rank; so do waits in two groups that cross (``crossed_waits``),
and waits for a rank that ended with an error in another group (``ended_ranks``).
"""

from __future__ import annotations

import atexit
import contextlib
import random
import threading
import time
import weakref
from typing import TYPE_CHECKING

from allgrad._wire import crossed_waits, deadline, diagnosis, ended_ranks, wait_spec
from allgrad._wire.groups import REGISTERED
from allgrad._wire.store import read, tick
from allgrad.errors import CollectiveMismatch, rank_table

if TYPE_CHECKING:
    from typing import TypeAlias

    from allgrad._wire.calls import Call
    from allgrad._wire.groups import Group
    from allgrad._wire.wait_spec import Alike
    from allgrad.errors import AllgradError

    Wait: TypeAlias = tuple[Call, Alike | None, float]

__all__ = ["STATE", "start", "take_found"]

_LOOK_EVERY = 1.0  # seconds
_LAST_LOOK = 5.0  # seconds that the end of the process waits for one
_ASKED = 8  # ranks each time: the store must not grow slow in a large world


class _State:
    """The watchdog of this process, and what it found."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        # The error of a group's wait, and when that wait began.
        self.found: weakref.WeakKeyDictionary[Group, tuple[float, AllgradError]]
        self.found = weakref.WeakKeyDictionary()
        self.looking = threading.Lock()


STATE = _State()


def start() -> None:
    """Start the watchdog of this process."""
    STATE.thread = threading.Thread(target=_watch, daemon=True, name="allgrad watchdog")
    STATE.thread.start()


@atexit.register
def _stop() -> None:
    """Wait for the last look. Python ends daemon threads as it exits, and inside a call of the store or a
    backend that aborts the process (test_checks_on_one_rank_from_the_first_call_on).
    """
    STATE.looking.acquire(timeout=_LAST_LOOK)


def take_found(call: Call, began: float) -> AllgradError | None:
    """What the watchdog found in the wait that has just failed, if anything."""
    since, found = STATE.found.pop(call.group, (began, None))
    return found if since == began else None


def _watch() -> None:
    seen: set[float] = set()
    while True:
        time.sleep(_LOOK_EVERY)
        with contextlib.suppress(RuntimeError):  # another thread uses its first group just now
            seen = _look(seen)


def _look(seen: set[float]) -> set[float]:
    """Compare the waits that were there at the last look too. Return when those of now began: the waits
    themselves would keep their tensors alive.
    """
    found = [group.waiting for group in list(REGISTERED)]
    waits: list[Wait] = [wait for wait in found if wait is not None]
    for wait in waits:
        if wait[2] in seen:
            with STATE.looking, contextlib.suppress(Exception):  # the group or its store is gone
                _compare(wait, alone=len(waits) == 1)
    return {began for _, _, began in waits}


def _compare(wait: Wait, alone: bool) -> None:
    call, alike, began = wait
    store = call.group.process_group.get_group_store()
    number, brought = call.group.calls, wait_spec.describe(call, alike)
    written = f"{number} {brought}\n{_exchanged(call)}"
    if call.group.waiting is not wait:
        return  # the number may be of the next call (test_a_wait_that_ended_is_not_written)
    store.set(f"allgrad/waits/{call.rank}", f"{tick(store)}\n{written}")
    others = [rank for rank in range(call.size) if rank != call.rank]
    asked = random.sample(others, min(len(others), _ASKED))
    rows = {call.rank: brought}
    for rank in asked:
        when, *told = read(store, f"allgrad/waits/{rank}").split("\n")
        if int(when or 0) > call.group.since:
            rows.update((rank, text) for at, text in map(_numbered, told) if at == number)
    odd = {
        rank: "differs"
        for rank, text in rows.items()
        if not wait_spec.all_fit({call.rank: brought, rank: text})
    }
    found: AllgradError | None = None
    if not odd:
        # Of several threads that wait, one may still come.
        found = crossed_waits.find(call, asked) if alone else None
        found = found or ended_ranks.find(call, asked)
    else:
        table = [rows.get(rank, "unknown") for rank in range(call.size)]
        if any(text.partition(" of ")[0] != brought.partition(" of ")[0] for text in rows.values()):
            rule = f"{call.name}: the ranks wait for each other in different calls."
            advice = "Make the same calls, in one order, on every rank; checked() names the lines."
        else:
            rule = f"{call.name}: the ranks bring different tensors to one call."
            advice = (
                "Give every rank the same keys, shapes, dtypes and sizes; checked() names the line."
            )
        found = CollectiveMismatch(rank_table(rule, table, odd, advice))
    if found is not None and call.group.waiting is wait:
        STATE.found[call.group] = began, found
        _end(call, found)


def _end(call: Call, error: AllgradError) -> None:
    diagnosis.publish_failure(error, call.group)
    ended_ranks.publish(error)
    deadline.close_connections(call)


def _exchanged(call: Call) -> str:
    """The last exchanges of counts that this rank made, and calls in which it sent nothing: others may
    still wait in one of them.
    """
    exchanged = [
        f"{number} {wait_spec.describe_exchange(*about)}" for number, *about in call.group.exchanged
    ]
    return "\n".join([*exchanged, *(f"{n} {text}" for n, text in call.group.empty_calls)])


def _numbered(text: str) -> tuple[int, str]:
    number, _, brought = text.partition(" ")
    return int(number or -1), brought
