"""Which rank is missing: a roll call in the group's store after a call has failed.

Every rank that is in trouble writes so into the store, looks who else did, and names those who
did not.

    rank 0   waits ... gives up   writes "here"   sees 0, 1, 3:   rank 2 is late
    rank 1   waits ... cut off    writes "here"   sees 0, 1, 3:   rank 2 is late
    rank 2   asleep                                               (wakes: the others gave up on it)
    rank 3   waits ... cut off    writes "here"   sees 0, 1, 3:   rank 2 is late
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allgrad._wire.calls import describe_shapes
from allgrad._wire.groups import world_rank, world_store
from allgrad.errors import (
    AllgradError,
    CollectiveMismatch,
    RankLate,
    RankLost,
    RankRaised,
    rank_table,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from allgrad._wire.calls import Call

__all__ = [
    "explain",
    "publish_failure",
    "raise_published",
    "raised_on",
    "register",
    "remember_agreed",
    "withdraw_failure",
]

_ROLL_CALL_SECONDS = 2.0
_GAVE_UP, _CUT_OFF = "gave up", "was cut off"

_last_agreed: dict[tuple[str, int], str] = {}
_published = False


def register(call: Call) -> None:
    """At the first use of a group: write process and host into its store, for a later roll call.

    Whatever this rank wrote into the same store in an earlier world is deleted.
    """
    if call.group.registered:
        return
    call.group.registered = True
    with contextlib.suppress(RuntimeError):
        store = call.group.process_group.get_group_store()
        store.delete_key(f"allgrad/roll/{call.rank}")
        store.set(f"allgrad/who/{call.rank}", f"{os.getpid()} {socket.gethostname()}")


def remember_agreed(call: Call, by_rank: Sequence[str]) -> None:
    """Keep what the ranks last agreed on, to show it for one that does not come again."""
    name = call.group.name
    for rank, text in enumerate(by_rank):
        _last_agreed[name, rank] = text


def publish_failure(error: BaseException) -> None:
    """Write into the store that this rank failed, for ranks that wait for it."""
    global _published  # noqa: PLW0603
    text = f"{type(error).__name__}: {error}"[:2000]
    with contextlib.suppress(RuntimeError):
        store = world_store()
        if store is not None:
            store.set(f"allgrad/raised/{world_rank()}", f"{time.time()}\n{text}")
            _published = True


def withdraw_failure() -> None:
    """Delete the failure that this rank published, before a new block starts."""
    global _published  # noqa: PLW0603
    if _published:
        _published = False
        with contextlib.suppress(RuntimeError):
            store = world_store()
            if store is not None:
                store.delete_key(f"allgrad/raised/{world_rank()}")


def raise_published(call: Call) -> None:
    """Raise the failure that another rank of the group published, if there is one."""
    store = world_store()
    if store is None:
        return
    failures = {}
    for rank, member in enumerate(call.group.members):
        key = f"allgrad/raised/{member}"
        if rank != call.rank and store.check([key]):
            when, text = store.get(key).decode("utf-8", errors="replace").split("\n", 1)
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
    call: Call, error: RuntimeError, waited: float, limit: float | None, alike: Tensor | None = None
) -> Exception:
    """Turn a backend's error about a silent or lost peer into one that names the rank.

    ``alike`` has one shape and dtype on every rank, if all is well.
    """
    text = str(error).lower()
    late = "timed out" in text or "timeout" in text
    lost = any(sign in text for sign in ("connection", "broken pipe", "socket", "read error"))
    if not late and not lost:
        return error
    try:
        trouble = _GAVE_UP if late else _CUT_OFF
        brought = call.name if alike is None else f"{call.name} of {describe_shapes([alike])}"
        return _call_roll(call, trouble, waited, limit, brought)
    except AllgradError as published:
        return published
    except RuntimeError:
        kind = RankLate if late else RankLost
        return kind(
            f"{call.name}: another rank {'did not come' if late else 'is gone'}, and the store in "
            "which the ranks find each other is gone too.\n"
            "Look at the process that started it (rank 0, or the launcher), and start again."
        )


def _call_roll(
    call: Call, trouble: str, waited: float, limit: float | None, brought: str
) -> Exception:
    store = call.group.process_group.get_group_store()
    store.set(f"allgrad/roll/{call.rank}", f"{waited:.3f} {trouble} in {brought}")
    until = time.monotonic() + _ROLL_CALL_SECONDS
    while True:
        raise_published(call)
        present = _present(call, store)
        absent = [rank for rank in range(call.size) if rank not in present]
        # Nobody waits for a process that is known to be gone.
        if all("is gone" in _about(call, store, rank) for rank in absent):
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
    gone = [rank for rank in marks if "is gone" in rows[rank]]
    if not marks and somebody_gave_up and len({brought for *_, brought in present.values()}) > 1:
        rule = f"{call.name}: the ranks waited for each other in different calls, or with other shapes."
        advice = "Give every rank the same calls and shapes; checked() names the lines."
        return CollectiveMismatch(rank_table(rule, rows, {}, advice))
    if gone or not somebody_gave_up:
        kind: type[AllgradError] = RankLost
        what = f"{_ranks(gone or list(marks))} lost" if marks else "a connection was lost"
    else:
        kind = RankLate
        within = "" if limit is None else f": not here within {limit:g} s"
        what = f"{_ranks(list(marks))} late{within}" if marks else "the ranks waited for nothing"
    advice = "Destroy the process group on every rank, and start again."
    return kind(rank_table(f"{call.name}: {what}.", rows, marks, advice))


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} are"


def _present(call: Call, store: Any) -> dict[int, tuple[float, str, str]]:
    """The ranks that answered the roll call: how long they waited, how that ended, and in what."""
    found = {}
    for rank in range(call.size):
        key = f"allgrad/roll/{rank}"
        if store.check([key]):
            seconds, _, text = store.get(key).decode("utf-8", errors="replace").partition(" ")
            trouble, _, brought = text.partition(" in ")
            found[rank] = (float(seconds), trouble, brought)
    return found


def _about(call: Call, store: Any, rank: int) -> str:
    """What is known of a rank that does not answer."""
    last = _last_agreed.get((call.group.name, rank))
    after = f"; last agreed on {last}" if last else ""
    key = f"allgrad/who/{rank}"
    if not store.check([key]):
        return "has not used this group yet" + after
    pid, host = store.get(key).decode("utf-8", errors="replace").split(" ", 1)
    return f"process {pid} on {host} {_process_state(pid, host)}{after}"


def _process_state(pid: str, host: str) -> str:
    if host != socket.gethostname() or not Path("/proc").is_dir():
        return "does not answer"
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "is gone"
    if state in "ZX":
        return "is gone"
    return "is stopped" if state in "Tt" else "runs, but is not in this call"
