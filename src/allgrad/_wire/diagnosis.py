"""Which rank is missing: a roll call in the group's store after a call has failed.

Every rank that is in trouble writes so into the store, looks who else did, and names those who
did not.

    rank 0   waits ... gives up   writes "here"   sees 0, 1, 3:   rank 2 is late
    rank 1   waits ... cut off    writes "here"   sees 0, 1, 3:   rank 2 is late
    rank 2   asleep                                               (wakes: the others gave up on it)
    rank 3   waits ... cut off    writes "here"   sees 0, 1, 3:   rank 2 is late

A rank that cannot reach the store hears nobody but the processes on its own host, and says so.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
import weakref
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allgrad._wire import ended_ranks, wait_spec
from allgrad._wire.groups import REGISTERED, world_rank, world_store
from allgrad._wire.store import StoreSilent, ask, clear, describe, read, ticks_so_far
from allgrad._wire.topology import ONE_HOST
from allgrad.errors import (
    AllgradError,
    CollectiveMismatch,
    RankLate,
    RankLost,
    RankRaised,
    in_words,
    rank_table,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from allgrad._wire.calls import Call
    from allgrad._wire.groups import Group
    from allgrad._wire.wait_spec import Alike

__all__ = [
    "explain",
    "is_inside_call",
    "is_known",
    "mark_inside_call",
    "mark_known",
    "publish_failure",
    "raise_published",
    "raised_on",
    "register",
    "remember_agreed",
    "withdraw_failure",
]

_ROLL_CALL_SECONDS = 2.0
_STORE_SECONDS = 1.5  # for all answers of the store together
_GAVE_UP, _CUT_OFF = "gave up", "was cut off"
_GONE, _RUNS = "is gone", "runs"
# How backends say that a connection failed.
_LOST = (
    *("connection", "broken pipe", "socket", "read error"),
    *("no route to host", "unreachable", "network is down"),
)

_ON_EVERY_RANK = CollectiveMismatch, RankLate, RankLost, RankRaised
# Attributes of errors: the group in which others were told, and the calls made on it; true.
_KNOWN, _INSIDE = "allgrad_known", "allgrad_inside"

# By process group, then by rank. A group of a later world has the same name.
_last_agreed: weakref.WeakKeyDictionary[Any, Sequence[str]] = weakref.WeakKeyDictionary()
_published = False


def register(call: Call) -> None:
    """At the first use of a group: write process and host into its store, for a later roll call.

    Whatever this rank wrote into the same store in an earlier world is cleared; and that it ended with
    an error, since it goes on.
    """
    if ended_ranks.STATE.published:
        ended_ranks.withdraw()
    if call.group.registered:
        return
    call.group.registered = True
    REGISTERED.add(call.group)
    with contextlib.suppress(RuntimeError):
        store = call.group.process_group.get_group_store()
        call.group.since = ask(store, partial(_register, store, call.rank))


def _register(store: Any, rank: int) -> int:
    clear(store, f"allgrad/roll/{rank}")
    # Of the world's store, in which the rank is the world's.
    clear(store, ended_ranks.ended_key(rank))
    store.set(f"allgrad/who/{rank}", f"{os.getpid()} {socket.gethostname()}")
    return ticks_so_far(store)


def remember_agreed(call: Call, by_rank: Sequence[str]) -> None:
    """Keep what the ranks last agreed on, to show it for one that does not come again."""
    _last_agreed[call.group.process_group] = by_rank


def mark_known(error: BaseException, call: Call) -> None:
    """The other ranks were told in this call of an error that is about to be raised, and raise too."""
    error.__dict__[_KNOWN] = call.group, call.group.calls


def is_known(error: BaseException) -> bool:
    """Tell whether the other ranks raise for the same reason: told again, they would do so twice
    (test_an_error_that_leaves_several_blocks_is_told_once). An object may be raised again later.
    """
    group, calls = error.__dict__.get(_KNOWN, (None, 0))
    return isinstance(error, _ON_EVERY_RANK) or (group is not None and group.calls == calls)


def mark_inside_call(error: BaseException) -> None:
    """An error that ends this rank's part in a call, which the others may be in."""
    error.__dict__[_INSIDE] = True


def is_inside_call(error: BaseException) -> bool:
    """Tell whether the other ranks may wait in a call, where a check of the next one is not heard
    (test_an_interrupt_inside_a_checked_call_ends_it_on_all_ranks).
    """
    return _INSIDE in error.__dict__


def publish_failure(error: BaseException, group: Group | None = None) -> None:
    """Write into the store that this rank failed, for ranks that wait for it.

    With a group, in a call of that group, which cannot be used any more; the rank may go on in others.
    """
    global _published  # noqa: PLW0603
    with contextlib.suppress(RuntimeError):
        store = world_store()
        if store is not None:
            raised = f"{time.time()}\n{group.name if group else ''}\n{in_words(error)[:2000]}"
            ask(store, lambda: store.set(f"allgrad/raised/{world_rank()}", raised))
            _published = True


def withdraw_failure() -> None:
    """Clear the failure that this rank published, before a new block starts."""
    global _published  # noqa: PLW0603
    if _published:
        _published = False
        with contextlib.suppress(RuntimeError):
            store = world_store()
            if store is not None:
                ask(store, lambda: clear(store, f"allgrad/raised/{world_rank()}"))


def raise_published(call: Call) -> None:
    """Raise the failure that another rank of the group published, if there is one."""
    store = world_store()
    if store is not None:
        with contextlib.suppress(StoreSilent):  # a slow link is no failure
            ask(store, partial(_raise_published, call, store))


def _raise_published(call: Call, store: Any, has_failed: bool = False) -> None:
    """Of failures in other groups, where the rank may have gone on, only those that can be why this call
    ``has_failed``.
    """
    failures = {}
    for rank, member in enumerate(call.group.members):
        written = read(store, f"allgrad/raised/{member}") if rank != call.rank else ""
        if written:
            when, group, text = written.split("\n", 2)
            if group in {"", call.group.name} or (
                has_failed and read(store, ended_ranks.ended_key(member))
            ):
                failures[rank] = (float(when), text)
    if failures:
        first = min(failures, key=lambda rank: failures[rank][0])
        raise raised_on(call, first, failures[first][1])


def raised_on(call: Call, rank: int, text: str) -> RankRaised:
    """The error of ranks that waited for one that failed."""
    return RankRaised(
        f"{call.name}: rank {rank} ended with an error of its own:\n  {text}\n"
        f"Fix that on rank {rank}; this rank only waited for it."
    )


def explain(
    call: Call, error: RuntimeError, waited: float, limit: float | None, alike: Alike | None = None
) -> Exception:
    """Turn a backend's error about a silent or lost peer into one that names the rank.

    ``alike`` fits what the other ranks bring, if all is well.
    """
    text = str(error).lower()
    late = "timed out" in text or "timeout" in text
    lost = any(sign in text for sign in _LOST)
    if not late and not lost:
        return error
    try:
        trouble = _GAVE_UP if late else _CUT_OFF
        brought = wait_spec.describe(call, alike)
        roll_call = partial(_call_roll, call, trouble, waited, limit, brought)
        store = call.group.process_group.get_group_store()
        found = ask(store, roll_call, _ROLL_CALL_SECONDS + _STORE_SECONDS)
    except AllgradError as published:
        found = published
    except RuntimeError as no_answer:
        silent = isinstance(no_answer, StoreSilent)
        return _without_store(call, waited, "does not answer" if silent else "is gone")
    ended_ranks.publish(found)
    return found


def _without_store(call: Call, waited: float, state: str) -> RankLost:
    """The error of a rank that cannot reach the store: it hears the processes of its host alone."""
    store = describe(call.group.process_group.get_group_store())
    topology = call.group.topology or ONE_HOST
    if not topology.hosts:
        return RankLost(
            f"{call.name}: another rank is late or gone, and {store}, in which the ranks find each "
            f"other, {state}.\n"
            "Look at the process that keeps it (rank 0, or the launcher), and start again."
        )
    here = topology.host_of[call.rank]
    rows, marks = [], {}
    for rank, pid in enumerate(topology.processes):
        name = topology.name_of(rank)
        if rank == call.rank:
            rows.append(f"this rank on {name} waited {waited:.1f} s")
        elif topology.host_of[rank] == here and (found := _local_state(str(pid))):
            rows.append(f"process {pid} on {name} {found}")
            if found == _GONE:
                marks[rank] = "not here"
        else:
            rows.append(f"process {pid} on {name}")
            marks[rank] = "cannot be heard"
    unheard = f"{_ranks(call, list(marks))} not heard, and " if marks else ""
    others = sorted({topology.name_of(rank) for rank in marks} - {topology.names[here]})
    look = f"the links to {', '.join(others)}, and " if others else ""
    advice = (
        f"Look at {look}the process that keeps the store (rank 0, or the launcher). "
        "Then start again."
    )
    rule = f"{call.name}: {unheard}{store} {state}."
    return RankLost(rank_table(rule, rows, marks, advice))


def _call_roll(
    call: Call, trouble: str, waited: float, limit: float | None, brought: str
) -> AllgradError:
    store, world = call.group.process_group.get_group_store(), world_store()
    store.set(f"allgrad/roll/{call.rank}", f"{waited:.3f} {trouble} in {brought}")
    until = time.monotonic() + _ROLL_CALL_SECONDS
    while True:
        if world is not None:
            _raise_published(call, world, has_failed=True)
        present = _present(call, store)
        absent = [rank for rank in range(call.size) if rank not in present]
        # Nobody waits for a process that is known to be gone.
        if all(_GONE in _about(call, store, rank) for rank in absent):
            break
        if time.monotonic() > until:
            break
        time.sleep(0.02)
    longest = max(seconds for seconds, *_ in present.values())
    somebody_gave_up = any(trouble == _GAVE_UP for _, trouble, _ in present.values())
    rows, marks = [], {}
    for rank in range(call.size):
        if rank not in present:
            rows.append(_about(call, store, rank))
            marks[rank] = "not here"
            continue
        seconds, trouble, brought = present[rank]
        rows.append(f"{trouble} after {seconds:.1f} s in {brought}")
        if somebody_gave_up and trouble == _CUT_OFF and seconds < longest / 2:
            marks[rank] = "came after others had given up"
    gone = [rank for rank in marks if _GONE in rows[rank]]
    fits = wait_spec.all_fit({rank: brought for rank, (_, _, brought) in present.items()})
    if not marks and somebody_gave_up and not fits:
        rule = f"{call.name}: the ranks waited for each other in different calls, or with other shapes."
        advice = "Give every rank the same calls and shapes; checked() names the lines."
        return CollectiveMismatch(rank_table(rule, rows, {}, advice))
    if gone or not somebody_gave_up:
        kind: type[AllgradError] = RankLost
        what = f"{_ranks(call, gone or list(marks))} lost" if marks else "a connection was lost"
    else:
        kind = RankLate
        within = "" if limit is None else f": not here within {limit:g} s"
        what = (
            f"{_ranks(call, list(marks))} late{within}" if marks else "the ranks waited for nothing"
        )
    advice = "Destroy the process group on every rank, and start again."
    return kind(rank_table(f"{call.name}: {what}.", rows, marks, advice))


def _ranks(call: Call, ranks: list[int]) -> str:
    """``rank 1 is``, or ``ranks 2, 3 on node-b are``: with their hosts where there are several."""
    topology = call.group.topology or ONE_HOST
    several = len(topology.hosts) > 1
    by_name: dict[str, list[int]] = {}
    for rank in ranks:
        by_name.setdefault(topology.name_of(rank) if several else "", []).append(rank)
    words = [
        f"rank{'s' if len(found) > 1 else ''} {', '.join(map(str, found))}"
        + (f" on {name}" if name else "")
        for name, found in by_name.items()
    ]
    return f"{' and '.join(words)} {'is' if len(ranks) == 1 else 'are'}"


def _present(call: Call, store: Any) -> dict[int, tuple[float, str, str]]:
    """The ranks that answered the roll call: how long they waited, how that ended, and in what."""
    found = {}
    for rank in range(call.size):
        written = read(store, f"allgrad/roll/{rank}")
        if written:
            seconds, _, text = written.partition(" ")
            trouble, _, brought = text.partition(" in ")
            found[rank] = (float(seconds), trouble, brought)
    return found


def _about(call: Call, store: Any, rank: int) -> str:
    """What is known of a rank that does not answer."""
    last = _last_agreed.get(call.group.process_group)
    after = f"; last agreed on {last[rank]}" if last else ""
    written = read(store, f"allgrad/who/{rank}")
    if not written:
        return "has not used this group yet" + after
    pid, host = written.split(" ", 1)
    return f"process {pid} on {host} {_process_state(pid, host)}{after}"


def _process_state(pid: str, host: str) -> str:
    state = _local_state(pid) if host == socket.gethostname() else ""
    if state == _RUNS:
        return f"{_RUNS}, but is not in this call"
    return state or "does not answer"


def _local_state(pid: str) -> str:
    """The state of a process of this host, where the system tells."""
    if not Path("/proc").is_dir():
        return ""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return _GONE
    if state in "ZX":
        return _GONE
    return "is stopped" if state in "Tt" else _RUNS
