"""Waiting for other ranks: for how long, and saying who did not come.

A call that fails because of another rank ends in a roll call: every rank that is in trouble writes
so into the group's store, looks who else did, and names those who did not.

    rank 0   waits ... gives up   writes "here"   sees 0, 1, 3:   rank 2 is late
    rank 1   waits ... cut off    writes "here"   sees 0, 1, 3:   rank 2 is late
    rank 2   asleep                                               (wakes: the others gave up on it)
    rank 3   waits ... cut off    writes "here"   sees 0, 1, 3:   rank 2 is late
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import weakref
from concurrent import futures
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from allgrad._core.torch_internals import backend_timeout
from allgrad._wire.groups import world_rank, world_store
from allgrad.errors import (
    AllgradError,
    InputError,
    ModeError,
    RankLate,
    RankLost,
    RankRaised,
    rank_table,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

from allgrad._wire.groups import Group

__all__ = [
    "cut_off",
    "deadline",
    "explain",
    "introduce",
    "limit",
    "listening",
    "patient",
    "raised_on",
    "remember",
    "take_back_failure",
    "tell_failure",
    "usual",
    "wait",
    "wait_for_peers",
]

_ROLL_CALL_SECONDS = 2.0
_LOOK_EVERY = 0.5
_ENVIRONMENT = "ALLGRAD_DEADLINE"
_NEVER_SENT = 0x7FFF  # a tag


def _seconds(value: object, where: str) -> float:
    try:
        seconds = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        seconds = -1.0
    if not 0 < seconds < 1e7:
        raise InputError(f"{where}={value!r} is not a time.\nGive seconds, more than 0.")
    return seconds


class _Limits:
    """The deadline in force, and the groups used by a block that listens for other ranks' errors."""

    def __init__(self) -> None:
        given = os.environ.get(_ENVIRONMENT)
        self.seconds = None if given is None else _seconds(given, _ENVIRONMENT)
        self.told = False
        self.used: dict[Any, Group] | None = None
        self.given_on = False  # whether some backend still has a deadline that it was given


_LIMITS = _Limits()


@contextlib.contextmanager
def deadline(seconds: float | None) -> Generator[None]:
    """Within this block, no call waits longer than this for another rank.

    When one does not come, the others raise ``RankLate`` with its number; when its connection is
    gone, ``RankLost``, at once. The group cannot be used after either: destroy it and start anew.
    ``None`` lifts an outer deadline. ``ALLGRAD_DEADLINE`` sets one for the whole program.
    """
    if torch.compiler.is_compiling():
        raise ModeError(
            "deadline: a block cannot be compiled.\nCall the compiled function inside it."
        )
    before, after = _LIMITS.seconds, None if seconds is None else _seconds(seconds, "deadline")
    _LIMITS.seconds = after
    try:
        yield
    finally:
        _LIMITS.seconds = before


@contextlib.contextmanager
def listening() -> Generator[dict[Any, Group]]:
    """Within this block, waiting ranks look every now and then whether another one failed.

    The block gets the groups that its calls use.
    """
    take_back_failure()
    outer = _LIMITS.used
    _LIMITS.used = {} if outer is None else outer
    try:
        yield _LIMITS.used
    finally:
        _LIMITS.used = outer


def patient() -> bool:
    """Tell whether calls simply wait: no deadline, nobody to listen to."""
    return _LIMITS.seconds is None and _LIMITS.used is None and not _LIMITS.given_on


def usual(group: Group) -> bool:
    """Tell whether a call of this group simply waits, and needs nothing before."""
    limits = _LIMITS
    return (
        limits.seconds is None
        and limits.used is None
        and not limits.given_on
        and group.held in _INTRODUCED
    )


_LIMITED: weakref.WeakKeyDictionary[Any, timedelta] = weakref.WeakKeyDictionary()


def limit(group: Group) -> None:
    """Give the backend the deadline too: what it has begun then ends, and the group can be destroyed.

    Without a deadline it gets back the limit it had.
    """
    process_group: Any = group.process_group
    if _LIMITS.seconds is not None:
        if process_group not in _LIMITED:
            _LIMITED[process_group] = backend_timeout(process_group)
        process_group.set_timeout(timedelta(seconds=_LIMITS.seconds))
    elif process_group in _LIMITED:
        process_group.set_timeout(_LIMITED.pop(process_group))
    _LIMITS.given_on = bool(_LIMITED)


def wait(group: Group, work: Any) -> None:
    """Wait for a started call, within the deadline, listening for other ranks' failures."""
    if work is None:
        return
    if _LIMITS.seconds is None and _LIMITS.used is None:
        work.wait()
        return
    began, allowed = time.monotonic(), _LIMITS.seconds
    while True:
        try:
            work.wait(timedelta(seconds=_LOOK_EVERY))
        except RuntimeError:
            if work.is_completed():
                raise
            _raise_told(group)
            if allowed is not None and time.monotonic() - began > allowed + _LOOK_EVERY:
                raise
        else:
            return


def wait_for_peers(group: Group, works: Sequence[Any]) -> None:
    """The same for messages from rank to rank. A wait for these cannot be tried: one that ends
    before they come ends the connections. So another thread waits while this one listens.
    """
    until = None if _LIMITS.seconds is None else time.monotonic() + _LIMITS.seconds
    if _LIMITS.used is None:
        _wait_until(until, works)
        return
    if not works:
        return
    done: Future[None] = Future()

    def wait_aside() -> None:
        try:
            _wait_until(until, works)
            done.set_result(None)
        except BaseException as error:  # noqa: BLE001 - raised where it is listened for
            done.set_exception(error)

    threading.Thread(target=wait_aside, daemon=True).start()
    while not futures.wait([done], _LOOK_EVERY).done:
        _raise_told(group)
    done.result()


def _wait_until(until: float | None, works: Sequence[Any]) -> None:
    for work in works:
        if until is None:
            work.wait()
        else:
            work.wait(timedelta(seconds=max(1e-3, until - time.monotonic())))


def cut_off(group: Group) -> None:
    """Close this rank's connections, after a message from rank to rank failed.

    Ranks may wait for this one that have nothing to do with the one that failed: so they are told.
    Gloo closes all connections when a wait ends before the message came.
    """
    for peer in range(group.size):
        if peer != group.rank:
            with contextlib.suppress(RuntimeError):
                never = group.process_group.recv([torch.empty(1)], peer, _NEVER_SENT)
                never.wait(timedelta(milliseconds=1))


def tell_failure(error: BaseException) -> None:
    """Leave word that this rank ended with an error, for ranks that wait for it."""
    text = f"{type(error).__name__}: {error}"[:2000]
    with contextlib.suppress(RuntimeError):
        store = world_store()
        if store is not None:
            store.set(f"allgrad/raised/{world_rank()}", f"{time.time()}\n{text}")
            _LIMITS.told = True


def take_back_failure() -> None:
    """Go on after a failure that was told: it is no longer true."""
    if _LIMITS.told:
        _LIMITS.told = False
        with contextlib.suppress(RuntimeError):
            store = world_store()
            if store is not None:
                store.delete_key(f"allgrad/raised/{world_rank()}")


def explain(group: Group, error: RuntimeError, waited: float) -> Exception:
    """Turn a backend's error about a silent or lost peer into one that names the rank."""
    text = str(error).lower()
    late = "timed out" in text or "timeout" in text
    lost = any(sign in text for sign in ("connection", "broken pipe", "socket", "read error"))
    if not late and not lost:
        return error
    try:
        return _roll_call(group, "waited in vain" if late else "was cut off", waited)
    except AllgradError as told:
        return told
    except RuntimeError:
        kind = RankLate if late else RankLost
        return kind(
            f"{group.call}: another rank {'did not come' if late else 'is gone'}, and the store in "
            "which the ranks find each other is gone too.\n"
            "Look at the process that started it (rank 0, or the launcher), and start anew."
        )


def _roll_call(group: Group, trouble: str, waited: float) -> Exception:
    store = group.process_group.get_group_store()
    store.set(f"allgrad/roll/{group.rank}", f"{waited:.3f} {trouble}")
    until = time.monotonic() + _ROLL_CALL_SECONDS
    while True:
        _raise_told(group)
        present = _present(group, store)
        absent = [rank for rank in range(group.size) if rank not in present]
        # Nobody waits for a process that is seen to be gone.
        if all("is gone" in _about(group, store, rank) for rank in absent):
            break
        if time.monotonic() > until:
            break
        time.sleep(0.02)
    longest = max(seconds for seconds, _ in present.values())
    someone_waited = any(trouble == "waited in vain" for _, trouble in present.values())
    rows, marks = [], {}
    for rank in range(group.size):
        if rank not in present:
            rows.append(_about(group, store, rank))
            marks[rank] = "not here"
            continue
        seconds, trouble = present[rank]
        rows.append(f"{trouble} after {seconds:.1f} s")
        if someone_waited and trouble == "was cut off" and seconds < longest / 2:
            marks[rank] = "came when others had given up"
    gone = [rank for rank in marks if "is gone" in rows[rank]]
    if gone or not someone_waited:
        kind: type[AllgradError] = RankLost
        what = f"{_ranks(gone or list(marks))} lost" if marks else "a connection was lost"
    else:
        kind = RankLate
        within = "" if _LIMITS.seconds is None else f": not here within {_LIMITS.seconds:g} s"
        what = f"{_ranks(list(marks))} late{within}" if marks else "the ranks waited in vain"
    advice = "Destroy the process group on every rank, and start anew."
    return kind(rank_table(f"{group.call}: {what}.", rows, marks, advice))


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} are"


_INTRODUCED: set[Any] = set()  # by weak references: looked up faster than in a WeakSet
_LAST_WORDS: dict[tuple[str, int], str] = {}


def introduce(group: Group) -> None:
    """On first use of a group: leave word who this is, for whoever misses this rank later.

    What this rank left at the same store in an earlier world is wiped out.
    """
    if _LIMITS.used is not None:
        _LIMITS.used[group.process_group] = group
    if group.held not in _INTRODUCED:
        _INTRODUCED.add(group.held)
        with contextlib.suppress(RuntimeError):
            store = group.process_group.get_group_store()
            store.delete_key(f"allgrad/roll/{group.rank}")
            store.set(f"allgrad/who/{group.rank}", f"{os.getpid()} {socket.gethostname()}")


def remember(group: Group, rank: int, words: str) -> None:
    """Keep what a rank last agreed on, to show it if it does not come again."""
    _LAST_WORDS[group.name, rank] = words


def _present(group: Group, store: Any) -> dict[int, tuple[float, str]]:
    """The ranks that answered the roll call: how long they waited, and how that ended."""
    found = {}
    for rank in range(group.size):
        key = f"allgrad/roll/{rank}"
        if store.check([key]):
            seconds, _, trouble = store.get(key).decode("utf-8", errors="replace").partition(" ")
            found[rank] = (float(seconds), trouble)
    return found


def _raise_told(group: Group) -> None:
    """Raise what another rank ended with, if it left word."""
    store = world_store()
    if store is None:
        return
    told = {}
    for rank, member in enumerate(group.members):
        key = f"allgrad/raised/{member}"
        if rank != group.rank and store.check([key]):
            when, text = store.get(key).decode("utf-8", errors="replace").split("\n", 1)
            told[rank] = (float(when), text)
    if told:
        first = min(told, key=lambda rank: told[rank][0])
        raise raised_on(group, first, told[first][1])


def raised_on(group: Group, rank: int, text: str) -> RankRaised:
    """The error for ranks that waited for one that failed."""
    return RankRaised(
        f"{group.call}: rank {rank} ended with an error of its own:\n  {text}\n"
        f"Mend that on rank {rank}; this rank only waited for it."
    )


def _about(group: Group, store: Any, rank: int) -> str:
    """What can be said of a rank that does not answer."""
    last = _LAST_WORDS.get((group.name, rank))
    after = f"; last agreed on {last}" if last else ""
    key = f"allgrad/who/{rank}"
    if not store.check([key]):
        return "has not used this group yet" + after
    pid, host = store.get(key).decode("utf-8", errors="replace").split(" ", 1)
    return f"process {pid} on {host} {_state(pid, host)}{after}"


def _state(pid: str, host: str) -> str:
    if host != socket.gethostname() or not Path("/proc").is_dir():
        return "does not answer"
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "is gone"
    if state in "ZX":
        return "is gone"
    return "is stopped" if state in "Tt" else "runs, but is not in this call"
