"""``run_ranks``: run a function on real ranks, and return the result of each."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from allgrad.errors import InputError
from allgrad.testing.failures import RankError, RankFailed, RanksStuck
from allgrad.testing.messages import Call, Finished
from allgrad.testing.pool import PATIENCE, Pool, Worker, as_answered
from allgrad.testing.serialization import deserialize, serialize, witness_of_main

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["run_in", "run_ranks"]

T = TypeVar("T")

_GRACE = 2.0  # seconds in which the other ranks may notice that one has failed
_LONGEST = 1_000_000  # seconds; a wait takes no infinite number of them
_lock = threading.Lock()
_pools: dict[int, Pool] = {}  # by process id: a forked child has no workers yet


def run_ranks(
    fn: Callable[..., T], world: int, *args: Any, backend: str = "gloo", timeout: float = 60.0
) -> list[T]:
    """Run ``fn(*args)`` on ``world`` ranks, each a process with a default process group.

        rank 0   fn(*args) -> a
        rank 1   fn(*args) -> b       --->     [a, b, c]
        rank 2   fn(*args) -> c

    The function may be a lambda or a closure; it is pickled by value if it cannot be imported.
    Results are returned without their autograd graphs. Each call starts with a seed for each rank.

    Raises ``RankFailed`` when a rank raises or dies; the other ranks are released. Raises
    ``RanksStuck`` after ``timeout`` seconds, with each rank's stack. The next call is not affected.

    Cost: milliseconds, since the processes are kept. The first call starts them; a call with
    another ``world`` or ``backend`` reconnects them, in tens of milliseconds.
    """
    if not isinstance(world, (int, Integral)) or world < 1:
        raise InputError(f"run_ranks: a world has at least one rank, not {world!r}.")
    if not isinstance(timeout, (int, float, Real)) or not 0 < timeout <= _LONGEST:
        raise InputError(
            f"run_ranks: timeout={timeout!r} are no seconds from 0 to {_LONGEST:,}.\n"
            "Give the seconds after which ranks that are not done are stuck."
        )
    with _lock:
        return run_in(_pool(), fn, world, args, backend, timeout)


def run_in(  # noqa: PLR0917
    pool: Pool,
    fn: Callable[..., T],
    world: int,
    args: tuple[Any, ...],
    backend: str,
    timeout: float,
    grace: float = _GRACE,
) -> list[T]:
    """Run a function on the ranks of a pool. ``grace`` is for the others when one has failed."""
    shipped = fn, args, witness_of_main()
    pickled = serialize(shipped, "run_ranks: the function or its arguments")
    call = Call(pickled, sys.path, str(Path.cwd()))
    try:
        workers = pool.enter(world, backend)
        finished, failed = _collect(workers, call, timeout * PATIENCE, grace)
    except BaseException:  # mostly an interrupt: the state of the ranks is unknown
        pool.close()
        raise
    pool.replace(rank for rank, error in failed.items() if error.how != "raised")
    if failed or _changed_world(finished):
        pool.invalidate()
    if all(error.how == "stuck" for error in failed.values()) and failed:
        raise RanksStuck(world, timeout * PATIENCE, failed)
    if failed:
        failure = RankFailed(world, failed)
        raise failure from failure.root.exception
    return [
        deserialize(finished[rank].pickled, f"the result of rank {rank}") for rank in range(world)
    ]


def _collect(
    workers: list[Worker], call: Call, timeout: float, grace: float
) -> tuple[dict[int, Finished], dict[int, RankError]]:
    """Run the call; return the ranks that finished and those that did not."""
    finished: dict[int, Finished] = {}
    failed: dict[int, RankError] = {}
    waiting = {worker.connection: rank for rank, worker in enumerate(workers)}
    for worker in workers:
        worker.send(call)
    for limit in (timeout, grace):
        for rank in as_answered(waiting, limit):
            answer = workers[rank].receive()
            if isinstance(answer, Finished):
                finished[rank] = answer
                continue
            first = not failed
            failed[rank] = answer if answer is not None else workers[rank].died(rank)
            if first:
                break  # the others now have the grace period only
        if not failed:
            break
    for rank in waiting.values():
        failed[rank] = workers[rank].stuck(rank)
    return finished, failed


def _changed_world(finished: dict[int, Finished]) -> bool:
    """Tell whether the call left groups, or calls that not every rank has made, in the world."""
    return (
        not all(answer.untouched for answer in finished.values())
        or len({answer.calls for answer in finished.values()}) > 1
    )


def _pool() -> Pool:
    if os.getpid() not in _pools:
        _pools[os.getpid()] = pool = Pool()
        atexit.register(pool.close)
    return _pools[os.getpid()]
