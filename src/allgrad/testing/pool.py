"""The worker processes of ``run_ranks``: started when first needed, kept for the next call.

One list of workers serves every world: a world of ``w`` ranks is the first ``w`` of them. They stay
connected in that world until a call needs another world or leaves this one in an unknown state.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection, wait
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from allgrad._wire.world import Rendezvous
from allgrad.errors import AllgradError
from allgrad.testing import failures
from allgrad.testing.failures import RankError, RankFailed
from allgrad.testing.messages import Enter, Entered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

__all__ = ["PATIENCE", "Pool", "Worker", "as_answered"]

PATIENCE = float(os.environ.get("ALLGRAD_PATIENCE", "1"))  # multiplies the time limits here
_START_LIMIT = 120.0  # importing torch on a busy machine
_ENTER_LIMIT = 20.0  # connecting takes milliseconds; leaving a world may wait for a pending call

# Keeps the current directory, whose files may have the names of libraries, out of sys.path; `python -P`
# does it only from Python 3.11 on.
_RUN_WORKER = """
import sys
sys.path[:] = filter(None, sys.path)
from allgrad.testing.worker import main
main()
"""


class Worker:
    """One worker process and the connection to it."""

    def __init__(
        self, prefix: Sequence[str] = (), settings: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Start it; ``prefix`` is the command that runs it, ``settings`` are of its environment."""
        ours, theirs = socket.socketpair()
        self._stack_file = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the worker lives
        descriptors = (theirs.fileno(), self._stack_file.fileno())
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(entry or os.curdir for entry in sys.path),
            "OMP_NUM_THREADS": "1",
            **settings,
        }
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603
                [*prefix, sys.executable, "-c", _RUN_WORKER, *map(str, descriptors)],
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
                env=environment,
            )
        self.connection = Connection(ours.detach())

    def send(self, message: object) -> None:
        """Send a message; a dead worker is noticed when its answer is received."""
        with contextlib.suppress(OSError):
            self.connection.send_bytes(pickle.dumps(message))

    def receive(self) -> Any:
        """Receive the answer; ``None`` if the worker has died."""
        try:
            return pickle.loads(self.connection.recv_bytes())  # noqa: S301 - from the process started above
        except (EOFError, OSError):
            return None

    def died(self, rank: int) -> RankError:
        """Describe how a process ended by itself."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        code = self._process.poll()
        if code is None:
            how = "closed its connection to the caller"
        elif code < 0:
            how = f"was killed by {_signal_name(-code)}"
        else:
            how = f"exited with code {code}"
        return RankError(rank, "died", f"the process {how}", self._stack(), time.monotonic())

    def stuck(self, rank: int) -> RankError:
        """Describe where a running process is."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)
        give_up = time.monotonic() + 1.0
        while not (stack := self._stack()) and time.monotonic() < give_up:
            time.sleep(0.01)
        return RankError(
            rank, "stuck", "still running", stack or "unknown location", time.monotonic()
        )

    def kill_process(self) -> None:
        """Kill the process, as a failing machine would: the caller finds out."""
        self._process.kill()
        self._process.wait()

    def kill(self) -> None:
        """Kill the process, and forget it."""
        self.kill_process()
        self.connection.close()
        self._stack_file.close()

    def alive(self) -> bool:
        """Tell whether the process waits for a message: it runs, and has sent nothing."""
        return self._process.poll() is None and not self.connection.poll()

    def _stack(self) -> str:
        written = os.pread(self._stack_file.fileno(), 1 << 20, 0).decode(errors="replace")
        return failures.rank_code(written)


def _signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):  # most real-time signals have no name
        return signal.Signals(number).name
    return f"signal {number}"


def as_answered(connections: dict[Connection, int], limit: float) -> Iterator[int]:
    """Yield ranks as their answers arrive, until all have or ``limit`` seconds have passed."""
    until = time.monotonic() + limit
    while connections:
        ready = wait(list(connections), max(0.0, until - time.monotonic()))
        if not ready:
            return
        for connection in ready:
            assert isinstance(connection, Connection)
            yield connections.pop(connection)


class Pool:
    """The workers in rank order, and the world that they are in."""

    def __init__(
        self,
        rendezvous: Rendezvous | None = None,
        start_worker: Callable[[int], Worker] = lambda _rank: Worker(),
    ) -> None:
        """Workers start on this machine and meet at its loopback, if nothing else is said."""
        self._rendezvous = rendezvous or Rendezvous()
        self._start_worker = start_worker
        self._workers: list[Worker | None] = []
        self._world: tuple[int, str] | None = None
        self._worlds_started = 0
        self._owner = os.getpid()

    def enter(self, world: int, backend: str) -> list[Worker]:
        """Return the workers of a started world, new or known to be unused since its last call."""
        for attempt in range(2):
            workers = self._start_workers(world)
            if self._world == (world, backend) or self._start_world(workers, backend):
                self._world = (world, backend)
                return workers
            if attempt == 0:
                self.replace(range(world))
        raise AllgradError(f"A world of {world} ranks ({backend}) did not start, twice.")

    def invalidate(self) -> None:
        """Make the next call start a new world, even of the same size."""
        self._world = None

    def replace(self, ranks: Iterable[int]) -> None:
        """Kill these processes; the next call starts new ones."""
        for rank in ranks:
            worker = self._workers[rank]
            self._workers[rank] = None
            self.invalidate()
            if worker is not None:
                worker.kill()

    def close(self) -> None:
        """Kill all processes; a forked child does not kill those of its parent."""
        if os.getpid() == self._owner:
            self.replace(range(len(self._workers)))

    def _start_workers(self, world: int) -> list[Worker]:
        """Start the missing ones of the first ``world`` workers, all at the same time."""
        self._workers += [None] * (world - len(self._workers))
        new = [
            rank
            for rank, worker in enumerate(self._workers[:world])
            if not (worker and worker.alive())
        ]
        self.replace(new)
        for rank in new:
            self._workers[rank] = self._start_worker(rank)
        workers = [worker for worker in self._workers[:world] if worker is not None]
        if not self._await_entered(workers, new, _START_LIMIT * PATIENCE):
            self.replace(new)
            raise AllgradError(
                f"Not all of {len(new)} new processes could import allgrad and start; "
                "their output on stderr tells why."
            )
        return workers

    def _start_world(self, workers: list[Worker], backend: str) -> bool:
        self.invalidate()
        self._worlds_started += 1
        for rank, worker in enumerate(workers):
            worker.send(
                Enter(
                    rank,
                    len(workers),
                    backend,
                    self._rendezvous.address,
                    self._rendezvous.port,
                    str(self._worlds_started),
                )
            )
        return self._await_entered(workers, range(len(workers)), _ENTER_LIMIT * PATIENCE)

    def _await_entered(self, workers: list[Worker], ranks: Sequence[int], limit: float) -> bool:
        """Tell whether all of ``ranks`` answer in time; an error of one of them is raised at once."""
        missing = {workers[rank].connection: rank for rank in ranks}
        arrived = 0
        for rank in as_answered(missing, limit):
            answer = workers[rank].receive()
            if isinstance(answer, RankError):
                self.replace(range(len(workers)))
                raise RankFailed(len(workers), {rank: answer})
            arrived += isinstance(answer, Entered)
        return arrived == len(ranks)
