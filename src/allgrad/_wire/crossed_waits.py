"""Ranks that wait for each other in calls of different groups, found by the watchdog.

    rank 0   waits in call 3 of group A      has made 5 calls of group B
    rank 1   waits in call 6 of group B      has made 2 calls of group A

Neither comes to the other's call: in no group is there a difference, and no rank is missing. While it
waits, each rank writes into the world's store in which call of which group, and how many calls of each
group it has made. A wait that another rank of the group cannot end, because it waits for this rank
itself, or for one that does, and so on, is over.

Nothing is said of a process with several busy threads, one of which may still come, nor of calls that do
not need every rank.
"""

from __future__ import annotations

import random
import sys
import threading
import weakref
from concurrent.futures import thread as pools
from typing import TYPE_CHECKING, Any, NamedTuple

from allgrad._wire.groups import AGREEMENT, calls_made, world_group, world_rank
from allgrad._wire.store import read, tick, ticks_so_far
from allgrad.errors import CollectiveMismatch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

    from allgrad._wire.calls import Call

__all__ = ["find"]

_NEED_ALL = frozenset({"all_reduce", "all_gather", "reduce_scatter", AGREEMENT})
# Behind the number of a look: this rank found a crossing and waits no more. Of the calls made, the
# message then has only those before the other rank's call.
_OVER = "over"


class _Wait(NamedTuple):
    """What a rank writes: a wait, and the calls that it has made of each group."""

    look: int
    group: str
    number: int
    name: str
    members: list[int]
    made: dict[str, int]
    is_over: bool = False

    def encode(self) -> str:
        members = " ".join(map(str, self.members))
        made = [f"{number} {name}" for name, number in self.made.items()]
        look = f"{self.look} {_OVER if self.is_over else ''}"
        return "\n".join([look, self.group, str(self.number), self.name, members, *made])

    @staticmethod
    def decode(text: str) -> _Wait:
        look, group, number, name, members, *made = text.split("\n")
        pairs = (line.partition(" ") for line in made)
        tick_of_look, _, over = look.partition(" ")
        return _Wait(
            int(tick_of_look),
            group,
            int(number),
            name,
            [int(rank) for rank in members.split()],
            {name: int(count) for count, _, name in pairs},
            over == _OVER,
        )


# What was read at the last look, by rank of the world. A wait counts when it was there at two looks, or
# when its own rank found that it crosses another: that rank may not look a second time.
_seen: dict[int, _Wait] = {}
# The ticks of a world's store before the first look in that world.
_since: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_ASKED = 8  # ranks of another group, and
_MOST = 64  # of all: the store must not grow slow in a large world


def find(call: Call, asked: Sequence[int]) -> CollectiveMismatch | None:
    """The error of a wait that no rank can end, after asking these ranks of its group."""
    world = world_group()
    if world is None or not _needs_all(call) or _other_threads():
        return None
    store = world.get_group_store()
    if world not in _since:
        _since[world] = ticks_so_far(store)
    own, members = call.group.name, call.group.members
    mine = _Wait(tick(store), own, call.group.calls, call.name, members, calls_made())
    store.set(_key(world_rank()), mine.encode())
    circle = _circle(_Waits(store, mine, _since[world]), mine, [members[rank] for rank in asked])
    if not circle:
        return None
    last = circle[-1][1]  # whose rank waits for this one
    crossed = {last.group: last.number - 1}
    store.set(_key(world_rank()), mine._replace(made=crossed, is_over=True).encode())
    ranks = [world_rank(), *(rank for rank, _ in circle)]
    rows = zip(ranks, [mine, *(wait for _, wait in circle)], strict=True)
    listed = f"{', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
    return CollectiveMismatch(
        f"{call.name}: ranks {listed} wait for each other in calls of different groups.\n"
        + "".join(
            f"  rank {rank}: {wait.name}, call {wait.number} of group {wait.group} {wait.members}\n"
            for rank, wait in rows
        )
        + "Make the calls of all groups in one order on every rank; in backward, inside a lockstep "
        "block."
    )


class _Waits:
    """What other ranks wrote, each read once in a look."""

    def __init__(self, store: Any, mine: _Wait, since: int) -> None:
        self.mine, self._since = mine, since
        self._store = store
        self._read: dict[int, tuple[_Wait, bool] | None] = {}

    def of(self, rank: int) -> tuple[_Wait, bool] | None:
        """The wait of a rank of the world, and whether it was there at the last look too."""
        if rank not in self._read and len(self._read) < _MOST:
            self._read[rank] = self._ask(rank)
        return self._read.get(rank)

    def _ask(self, rank: int) -> tuple[_Wait, bool] | None:
        text = read(self._store, _key(rank))
        wait = _Wait.decode(text) if text else None
        if wait is None or wait.look <= self._since:  # of a former world
            return None
        before, _seen[rank] = _seen.get(rank), wait
        if wait.is_over or before is None or before[1:4] != wait[1:4]:
            return wait, False
        return wait, self._since < before.look < wait.look


def _circle(waits: _Waits, wait: _Wait, asked: Sequence[int]) -> list[tuple[int, _Wait]]:
    """Ranks that wait for each other, from one that ``wait`` is for to one that waits for this rank."""
    here, seen = world_rank(), {world_rank()}
    paths: list[list[tuple[int, _Wait]]] = [[]]
    for path in paths:
        target = path[-1][1] if path else wait
        others = (
            asked if not path else random.sample(target.members, min(_ASKED, len(target.members)))
        )
        for rank in others:
            found = None if rank in seen else waits.of(rank)
            if found is None or not _holds_up(target, *found):
                continue
            seen.add(rank)
            longer = [*path, (rank, found[0])]
            if here in found[0].members and _holds_up(found[0], waits.mine, again=True):
                return longer
            paths.append(longer)
    return []


def _holds_up(target: _Wait, wait: _Wait, again: bool) -> bool:
    """Whether the rank of ``wait`` does not come to the call of ``target`` as long as it waits."""
    # Of this very call, not of an earlier one that somebody caught.
    over = wait.is_over and wait.made == {target.group: target.number - 1}
    comes_later = wait.made.get(target.group, 0) < target.number
    return wait.group != target.group and comes_later and (again or over)


def _key(rank: int) -> str:
    return f"allgrad/crossed/{rank}"


def _needs_all(call: Call) -> bool:
    operation = call.group.doing[0]
    return operation in _NEED_ALL or call.name == operation == "all_to_all"


def _other_threads() -> bool:
    """Tell whether another thread of the program runs, which may make a call too.

    A worker of a pool that has nothing to do gets no work from a thread that waits.
    """
    frames = sys._current_frames()  # noqa: SLF001
    alive = (thread for thread in threading.enumerate() if not thread.daemon)
    return sum(not _is_idle(frames.get(thread.ident or 0)) for thread in alive) > 1


def _is_idle(frame: FrameType | None) -> bool:
    if frame is None:
        return True
    code = frame.f_code
    return code.co_name == "_worker" and code.co_filename == pools.__file__
