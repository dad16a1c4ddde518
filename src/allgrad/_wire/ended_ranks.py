"""Ranks that wait for one that has ended with an error in a call of another group.

    rank 0   in a call of the world          found: ranks 0 and 1 wait for each other, raises
    rank 1   in a call of group [0, 1]       found the same, raises
    rank 2   in a call of group [1, 2]       waits for rank 1, whose connections in this group are open

A rank whose wait ended with an error writes it into the world's store, and how many calls of each group
it had made. Ranks that wait for it in the next call of one of these groups read that, and end too. A rank
that caught its error goes on: its next call, of any group, clears what it wrote. So the others give it
some seconds.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from allgrad._wire.groups import LIVE, calls_made, world_rank, world_store
from allgrad._wire.store import ask, clear, read
from allgrad.errors import RankRaised, in_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from allgrad._wire.calls import Call
    from allgrad._wire.groups import Group

__all__ = ["STATE", "ended_key", "find", "publish", "withdraw"]

_GRACE = 10.0  # seconds without a call, after which a rank that has ended does not go on


class _State:
    """What this rank wrote and read."""

    def __init__(self) -> None:
        self.published = False
        # Groups whose next call is prepared anew, to clear what was written.
        self.paused: list[Group] = []
        self.seen: dict[int, tuple[str, float]] = {}  # what other ranks wrote, and since when


STATE = _State()


def ended_key(rank: int) -> str:
    """Where a rank of the world writes that it ended."""
    return f"allgrad/ended/{rank}"


def publish(error: Exception) -> None:
    """Write that this rank ends with an error, and the calls that it has made of each group."""
    store = world_store()
    if store is None:
        return
    made = [f"{number} {name}" for name, number in calls_made().items()]
    lines = "\n".join([str(len(made)), *made, in_words(error)[:2000]])
    with contextlib.suppress(RuntimeError):
        ask(store, lambda: store.set(ended_key(world_rank()), lines))
    STATE.published = True
    STATE.paused += [group for group in LIVE if group.registered]
    for group in STATE.paused:
        group.registered = False


def withdraw() -> None:
    """Clear what this rank wrote: it makes another call."""
    STATE.published = False
    for group in STATE.paused:
        group.registered = True
    STATE.paused.clear()
    with contextlib.suppress(RuntimeError):
        store = world_store()
        if store is not None:
            ask(store, lambda: clear(store, ended_key(world_rank())))


def find(call: Call, asked: Sequence[int]) -> RankRaised | None:
    """The error of a wait for one of these ranks of the group, if it ended before this call."""
    store, members = world_store(), call.group.members
    for rank in asked if store is not None else ():
        member = members[rank]
        written = read(store, ended_key(member))
        if not written:
            STATE.seen.pop(member, None)
            continue
        before, since = STATE.seen.get(member, ("", 0.0))
        if written != before:
            STATE.seen[member] = written, time.monotonic()
        elif time.monotonic() - since > _GRACE:
            count, *lines = written.split("\n")
            pairs = (line.partition(" ") for line in lines[: int(count)])
            made = {name: int(number) for number, _, name in pairs}
            if made.get(call.group.name, 0) == call.group.calls - 1:
                error = "\n".join(lines[int(count) :])
                return RankRaised(
                    f"{call.name}: rank {member} of group {call.group.name} {members} ended in "
                    f"another call:\n  {error}\n"
                    f"Fix that; rank {world_rank()} only waited for rank {member}."
                )
    return None
