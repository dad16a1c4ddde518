"""``run_ranks``: a function on real ranks, and what each of them returned."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from allgrad.errors import InputError
from allgrad.testing.failures import RankError, RankFailed, RanksStuck
from allgrad.testing.messages import Call, Finished
from allgrad.testing.pool import Pool, Worker, listen
from allgrad.testing.shipping import load, ship

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["run_ranks"]

T = TypeVar("T")

_GRACE = 2.0  # how long the other ranks may take to notice that one has failed
_lock = threading.Lock()
_pools: dict[int, Pool] = {}  # by process id: a forked child has no workers yet


def run_ranks(
    fn: Callable[..., T], world: int, *args: Any, backend: str = "gloo", timeout: float = 60.0
) -> list[T]:
    """Run ``fn(*args)`` on ``world`` ranks, each a process with a default process group.

        rank 0   fn(*args) -> a
        rank 1   fn(*args) -> b       --->     [a, b, c]
        rank 2   fn(*args) -> c

    The function may be a lambda or a closure; it travels by value where it cannot be imported.
    Results come back without their graphs. Seeds are set by rank before each call.

    Raises ``RankFailed`` when a rank raises or dies; the other ranks are released. Raises
    ``RanksStuck`` after ``timeout`` seconds, with each rank's stack. The next call is not affected.

    Cost: the processes are kept, so a call takes milliseconds. The first call starts them, and a
    call with another ``world`` or ``backend`` connects them anew, in tens of milliseconds.
    """
    if world < 1:
        raise InputError(f"run_ranks: a world has at least one rank, not {world}.")
    packed = ship((fn, args), "run_ranks: the function or its arguments")
    call = Call(packed, sys.path, str(Path.cwd()))
    with _lock:
        pool = _pool()
        try:
            workers = pool.enter(world, backend)
            finished, failed = _collect(workers, call, timeout)
        except BaseException:  # an interrupt, mostly: nobody knows what the ranks are doing now
            pool.close()
            raise
        pool.replace(rank for rank, error in failed.items() if error.how != "raised")
        if failed or _left_behind(finished):
            pool.doubt()
    if all(error.how == "stuck" for error in failed.values()) and failed:
        raise RanksStuck(world, timeout, failed)
    if failed:
        failure = RankFailed(world, failed)
        raise failure from failure.root.exception
    return [load(finished[rank].packed, f"the result of rank {rank}") for rank in range(world)]


def _collect(
    workers: list[Worker], call: Call, timeout: float
) -> tuple[dict[int, Finished], dict[int, RankError]]:
    """Run the call; sort the ranks into those that finished and those that did not."""
    finished: dict[int, Finished] = {}
    failed: dict[int, RankError] = {}
    waiting = {worker.line: rank for rank, worker in enumerate(workers)}
    for worker in workers:
        worker.send(call)
    for limit in (timeout, _GRACE):
        for rank in listen(waiting, limit):
            answer = workers[rank].receive()
            if isinstance(answer, Finished):
                finished[rank] = answer
                continue
            first = not failed
            failed[rank] = answer if answer is not None else workers[rank].died(rank)
            if first:
                break  # from now on the others have only the grace period
        if not failed:
            break
    for rank in waiting.values():
        failed[rank] = workers[rank].stuck(rank)
    return finished, failed


def _left_behind(finished: dict[int, Finished]) -> bool:
    """Tell whether groups, or calls that not every rank has made, are left in the world."""
    return (
        not all(answer.untouched for answer in finished.values())
        or len({answer.calls for answer in finished.values()}) > 1
    )


def _pool() -> Pool:
    if os.getpid() not in _pools:
        _pools[os.getpid()] = pool = Pool()
        atexit.register(pool.close)
    return _pools[os.getpid()]
