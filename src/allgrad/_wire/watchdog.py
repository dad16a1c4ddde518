"""A watchdog for waits without a deadline: it ends those of ranks that are in different calls.

Messages of other shapes or dtypes never meet (``messages``), so ranks that bring such tensors to
one call wait for each other; so do ranks that call different collectives, or name another src or dst.
A thread of each process looks once a second. While this rank waits, it writes into the group's store
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
from typing import TYPE_CHECKING

from allgrad._wire import crossed_waits, deadline, diagnosis, ended_ranks, wait_spec
from allgrad.errors import CollectiveMismatch, rank_table

if TYPE_CHECKING:
    from allgrad._wire.calls import Call
    from allgrad._wire.wait_spec import Alike
    from allgrad.errors import AllgradError

__all__ = ["STATE", "start", "take_found"]

_LOOK_EVERY = 1.0  # seconds
_LAST_LOOK = 5.0  # seconds that the end of the process waits for one
_ASKED = 8  # ranks each time: the store must not grow slow in a large world


class _State:
    """The wait of this process that the watchdog looks at, and what it found."""

    def __init__(self) -> None:
        self.waiting: tuple[Call, Alike | None, float] | None = None
        self.thread: threading.Thread | None = None
        self.found: AllgradError | None = None
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


def take_found() -> AllgradError | None:
    """What the watchdog found in the wait that has just failed, if anything."""
    found, STATE.found = STATE.found, None
    return found


def _watch() -> None:
    seen = None  # when the wait began; the wait itself would keep its tensor alive
    while True:
        time.sleep(_LOOK_EVERY)
        waiting = STATE.waiting
        began = None if waiting is None else waiting[2]
        if waiting is not None and began == seen:  # it was already there a second ago
            with STATE.looking, contextlib.suppress(Exception):  # the group or its store is gone
                _compare(waiting)
        seen = began
        del waiting


def _compare(waiting: tuple[Call, Alike | None, float]) -> None:
    call, alike, _ = waiting
    store = call.group.process_group.get_group_store()
    number, brought = call.group.calls, wait_spec.describe(call, alike)
    store.set(f"allgrad/waits/{call.rank}", f"{number} {brought}\n{_exchanged(call)}")
    others = [rank for rank in range(call.size) if rank != call.rank]
    asked = random.sample(others, min(len(others), _ASKED))
    rows = {call.rank: brought}
    for rank in asked:
        key = f"allgrad/waits/{rank}"
        if store.check([key]):
            told = store.get(key).decode("utf-8", errors="replace")
            rows.update(
                (rank, text) for at, text in map(_numbered, told.split("\n")) if at == number
            )
    odd = {
        rank: "differs"
        for rank, text in rows.items()
        if not wait_spec.all_fit({call.rank: brought, rank: text})
    }
    found = None if odd else crossed_waits.find(call, asked) or ended_ranks.find(call, asked)
    if found is not None and STATE.waiting is waiting:
        _end(call, found)
    if odd and STATE.waiting is waiting:
        table = [rows.get(rank, "unknown") for rank in range(call.size)]
        if any(text.partition(" of ")[0] != brought.partition(" of ")[0] for text in rows.values()):
            rule = f"{call.name}: the ranks wait for each other in different calls."
            advice = "Make the same calls, in one order, on every rank; checked() names the lines."
        else:
            rule = f"{call.name}: the ranks bring different tensors to one call."
            advice = (
                "Give every rank the same keys, shapes, dtypes and sizes; checked() names the line."
            )
        _end(call, CollectiveMismatch(rank_table(rule, table, odd, advice)))


def _end(call: Call, error: AllgradError) -> None:
    STATE.found = error
    diagnosis.publish_failure(error, call.group)
    ended_ranks.publish(error)
    deadline.close_connections(call)


def _exchanged(call: Call) -> str:
    """The last exchanges of counts that this rank made: others may still wait in one of them."""
    return "\n".join(
        f"{number} {wait_spec.describe_exchange(*about)}" for number, *about in call.group.exchanged
    )


def _numbered(text: str) -> tuple[int, str]:
    number, _, brought = text.partition(" ")
    return int(number or -1), brought
