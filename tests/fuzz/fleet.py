"""Several processes that run batches. One that hangs or dies is a find, and the others go on."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from fuzz.batches import Mode, Outcome, run_batch
from fuzz.coverage import Coverage

if TYPE_CHECKING:
    from collections.abc import Callable

LIMIT = 1800.0  # seconds for a batch, finds and their minimising included
LAST = 20.0  # seconds that batches may take after the time is up
SAY_EVERY = 5.0


class Hunt:
    """Takes seeds until there are enough programs or the time is up, and counts what came out."""

    def __init__(self, mode: Mode, seeds: range, minutes: float | None, write: Callable) -> None:
        self.mode, self.write = mode, write
        self.coverage, self.finds = Coverage(), 0
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._until = self._began + 60 * minutes if minutes else float("inf")
        self._said = self._began
        self._first, self._stop = seeds.start, seeds.stop
        self._again: queue.SimpleQueue[range] = queue.SimpleQueue()

    def take(self) -> range:
        """The next batch; an empty one when there is nothing left to do."""
        with self._lock:
            if not self._again.empty():
                return self._again.get()
            if time.monotonic() > self._until:
                return range(0)
            first = self._first
            self._first = min(first + self.mode.batch, self._stop)
            return range(first, self._first)

    def add(self, outcome: Outcome) -> None:
        with self._lock:
            for found in outcome.features:
                self.coverage.add(found)
            for find in outcome.finds:
                self.write(find)
            self.finds += len(outcome.finds)
            if outcome.finds or time.monotonic() - self._said > SAY_EVERY:
                self._said = time.monotonic()
                self.write(self.counts())

    def counts(self) -> str:
        seconds = time.monotonic() - self._began
        return f"{self.coverage.programs} programs in {seconds:.0f} s, {self.finds} went wrong"

    def limit(self) -> float:
        """How many seconds a batch may still take."""
        return max(0.0, min(LIMIT, self._until + LAST - time.monotonic()))

    def broke(self, seeds: range, how: str) -> None:
        """A process was lost on this batch: a find; the halves go on, until one seed is left."""
        name = " ".join([*self.mode.options, f"seeds {seeds.start} to {seeds.stop - 1}"])
        outcome = Outcome(finds=[f"# {name}: {how}"])
        half = seeds.start + len(seeds) // 2
        if len(seeds) > 1:
            self._again.put(range(seeds.start, half))
            self._again.put(range(half, seeds.stop))
        else:
            outcome.features.append([])
        self.add(outcome)


def run_here(hunt: Hunt) -> None:
    """All batches in this process."""
    while seeds := hunt.take():
        hunt.add(run_batch(hunt.mode, seeds))


def run_fleet(hunt: Hunt, workers: int) -> None:
    """The batches in processes of their own, so many at a time."""
    threads = [threading.Thread(target=_drive, args=(hunt,), daemon=True) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _drive(hunt: Hunt) -> None:
    worker = None
    while seeds := hunt.take():
        worker = worker or _Worker(hunt.mode)
        try:
            hunt.add(worker.run(seeds, hunt.limit()))
        except _Cut:
            worker = None
            hunt.write(f"# seeds {seeds.start} to {seeds.stop - 1} not run: the time is up")
        except _Lost as lost:
            worker = None
            hunt.broke(seeds, str(lost))
    if worker:
        worker.end()


class _Lost(Exception):
    """A worker hung or died."""


class _Cut(Exception):
    """The time of the hunt is up."""


class _Worker:
    """A process that takes batches on its standard input; it and its ranks are a process group."""

    def __init__(self, mode: Mode) -> None:
        command = [sys.executable, str(Path(__file__).parent), *mode.options, "--serve"]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def run(self, seeds: range, limit: float) -> Outcome:
        try:
            self._process.stdin.write(f"{seeds.start} {seeds.stop}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # read below that it is gone
        ready, _, _ = select.select([self._process.stdout], [], [], limit)
        line = self._process.stdout.readline() if ready else b""
        if line.endswith(b"\n"):
            return Outcome(**json.loads(line))
        self.end()
        if not ready and limit < LIMIT:
            raise _Cut
        raise _Lost(
            f"exited with {self._process.returncode}" if ready else f"hung for {LIMIT:.0f} s"
        )

    def end(self) -> None:
        self._process.stdin.close()
        if select.select([self._process.stdout], [], [], 5)[0]:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def serve(mode: Mode) -> None:
    """Run in a worker: a batch for each line of standard input, an outcome for each on the output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what ranks print goes elsewhere
    for line in sys.stdin:
        first, stop = map(int, line.split())
        outcome = run_batch(mode, range(first, stop))
        answers.write(json.dumps(outcome.__dict__) + "\n")
        answers.flush()
