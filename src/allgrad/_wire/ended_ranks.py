"""Ranks that wait for one that the watchdog has ended in a call of another group.

    rank 0   in a call of the world          found: ranks 0 and 1 wait for each other, raises
    rank 1   in a call of group [0, 1]       found the same, raises
    rank 2   in a call of group [1, 2]       waits for rank 1, whose connections in this group are open

A rank that the watchdog ends writes its error into the world's store, and how many calls of each group
it had made. Ranks that wait for it in the next call of one of these groups read that, and end too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from allgrad._wire import diagnosis
from allgrad._wire.groups import calls_made, world_rank, world_store
from allgrad.errors import RankRaised

if TYPE_CHECKING:
    from collections.abc import Sequence

    from allgrad._wire.calls import Call
    from allgrad.errors import AllgradError

__all__ = ["find", "publish"]


def publish(error: AllgradError) -> None:
    """Write that this rank ends with an error, and the calls that it has made of each group."""
    store = world_store()
    if store is not None:
        made = [f"{number} {name}" for name, number in calls_made().items()]
        text = f"{type(error).__name__}: {error}"[:2000]
        store.set(diagnosis.ended_key(world_rank()), "\n".join([str(len(made)), *made, text]))


def find(call: Call, asked: Sequence[int]) -> RankRaised | None:
    """The error of a wait for one of these ranks of the group, if it ended before this call."""
    store, members = world_store(), call.group.members
    for rank in asked if store is not None else ():
        key = diagnosis.ended_key(members[rank])
        if store.check([key]):
            count, *lines = store.get(key).decode("utf-8", errors="replace").split("\n")
            pairs = (line.partition(" ") for line in lines[: int(count)])
            made = {name: int(number) for number, _, name in pairs}
            # Not one that caught an earlier error, and has made calls of this group since.
            if made.get(call.group.name, 0) == call.group.calls - 1:
                error = "\n".join(lines[int(count) :])
                return RankRaised(
                    f"{call.name}: rank {members[rank]} of group {call.group.name} {members} ended in "
                    f"another call:\n  {error}\n"
                    f"Fix that; rank {world_rank()} only waited for rank {members[rank]}."
                )
    return None
