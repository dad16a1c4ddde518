"""Ranks that wait for each other in calls of different groups, found by the watchdog.

    rank 0   waits in call 3 of group A      has made 5 calls of group B
    rank 1   waits in call 6 of group B      has made 2 calls of group A

Neither comes to the other's call: in no group is there a difference, and no rank is missing. While it
waits, each rank writes into the world's store in which call of which group, and how many calls of each
group it has made. A wait that another rank of the group cannot end, because it waits for this rank
itself, is over.

Nothing is said of a process with several threads, one of which may still come, nor of calls that do not
need every rank.
"""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, NamedTuple

from allgrad._wire.groups import AGREEMENT, calls_made, world_rank, world_store
from allgrad.errors import CollectiveMismatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from allgrad._wire.calls import Call

__all__ = ["find"]

_NEED_ALL = frozenset({"all_reduce", "all_gather", "reduce_scatter", AGREEMENT})
_looks = itertools.count(1)
# In place of the number of a look: this rank found a crossing and waits no more. Of the calls made, the
# message then has only those before the other rank's call.
_OVER = 0


class _Wait(NamedTuple):
    """What a rank writes: a wait, and the calls that it has made of each group."""

    look: int
    group: str
    number: int
    name: str
    members: list[int]
    made: dict[str, int]

    def encode(self) -> str:
        members = " ".join(map(str, self.members))
        made = [f"{number} {name}" for name, number in self.made.items()]
        return "\n".join([str(self.look), self.group, str(self.number), self.name, members, *made])

    @staticmethod
    def decode(text: str) -> _Wait:
        look, group, number, name, members, *made = text.split("\n")
        pairs = (line.partition(" ") for line in made)
        return _Wait(
            int(look),
            group,
            int(number),
            name,
            [int(rank) for rank in members.split()],
            {name: int(count) for count, _, name in pairs},
        )


# What was read at the last look, by rank of the world. A wait counts when it was there at two looks, or
# when its own rank found that it crosses another: that rank may not look a second time.
_seen: dict[int, _Wait] = {}


def find(call: Call, asked: Sequence[int]) -> CollectiveMismatch | None:
    """The error of a wait that no rank can end, after asking these ranks of its group."""
    store = world_store()
    if store is None or not _needs_all(call) or _other_threads():
        return None
    made = calls_made()
    own, members = call.group.name, call.group.members
    mine = _Wait(next(_looks), own, call.group.calls, call.name, members, made)
    store.set(_key(world_rank()), mine.encode())
    for rank in asked:
        other, key = members[rank], _key(members[rank])
        if not store.check([key]):
            continue
        wait = _Wait.decode(store.get(key).decode("utf-8", errors="replace"))
        before, _seen[other] = _seen.get(other), wait
        again = before is not None and before[1:4] == wait[1:4] and before.look < wait.look
        # Of this very call, not of an earlier one that somebody caught.
        over = wait.look == _OVER and wait.made == {own: mine.number - 1}
        if (
            (again or over)
            and wait.group != own
            and world_rank() in wait.members
            and wait.made.get(own, 0) < mine.number
            and made.get(wait.group, 0) < wait.number
        ):
            crossed = {wait.group: wait.number - 1}
            store.set(_key(world_rank()), mine._replace(look=_OVER, made=crossed).encode())
            return CollectiveMismatch(
                f"{call.name}: ranks {world_rank()} and {other} wait for each other in calls of "
                "different groups.\n"
                f"  rank {world_rank()}: {mine.name}, call {mine.number} of group {own} {members}\n"
                f"  rank {other}: {wait.name}, call {wait.number} of group {wait.group} {wait.members}\n"
                "Make the calls of all groups in one order on every rank; in backward, inside a "
                "lockstep block."
            )
    return None


def _key(rank: int) -> str:
    return f"allgrad/crossed/{rank}"


def _needs_all(call: Call) -> bool:
    operation = call.group.doing[0]
    return operation in _NEED_ALL or call.name == operation == "all_to_all"


def _other_threads() -> bool:
    """Tell whether another thread of the program runs, which may make a call too."""
    return sum(not thread.daemon for thread in threading.enumerate()) > 1
