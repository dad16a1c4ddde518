"""A recording: every wire call of a rank, in a file that outlives the process.

    rank-3.allgrad
        0      magic, then the header: JSON, padded with zeros
        4088   when the recording ended, in ns; 0 while it runs, and after a crash
        4096   the ring: ``calls`` events of 36 bytes, the oldest overwritten first
        then   the table: JSON, one line for each kind of call, group, thread and error, and what
               ended the program

The ring is mapped memory: what was written is in the file the moment it is written, also when the
process is killed, and other processes can read it meanwhile. An event is written when the call
begins, with end 0, and completed when it ends. What calls have in common (name, line, algorithm,
group and more) is a *kind*, written once. Nothing is sent: ``report`` aligns the ranks' clocks.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import mmap
import os
import socket
import struct
import sys
import threading
import time
import warnings
from pathlib import Path
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from allgrad._core.call_queue import QUEUE as _QUEUE
from allgrad._core.call_queue import in_backward
from allgrad._core.torch_internals import graph_task
from allgrad._core.version import __version__
from allgrad._wire.calls import call_site, error_site, locate_calls
from allgrad._wire.groups import world_rank, world_size
from allgrad._wire.observers import STATE
from allgrad.errors import InputError, ModeError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from torch import Tensor

    from allgrad._wire.algorithms import Choice
    from allgrad._wire.calls import Call

__all__ = [
    "CLOSED_AT",
    "EVENT_BYTES",
    "FAILED",
    "HEADER_BYTES",
    "MAGIC",
    "Recorder",
    "boot",
    "recorded",
]

MAGIC = b"allgrad recording 1\n"
HEADER_BYTES, CLOSED_AT = 4096, 4088
# start, end, bytes out (low, high), bytes in (high, low), number in its group, kind
EVENT_BYTES = struct.calcsize("<QQIHHIII")
# The same with zeros for what is known at the end; the end; a time; a kind.
_BEGIN, _END = struct.Struct("<Q8x4x2xHIII"), struct.Struct("<QIH")
_TIME, _KIND = struct.Struct("<Q"), struct.Struct("<I")
_write_begin, _write_end = _BEGIN.pack_into, _END.pack_into
FAILED = 1 << 63  # in the end of a call that raised
_MOST_ERRORS, _MOST_PREPARED = 1000, 1024
_ENVIRONMENT, _ENVIRONMENT_CALLS = "ALLGRAD_RECORD", "ALLGRAD_RECORD_CALLS"
_DEFAULT_CALLS = 1 << 18


def _again_and_again(numbers: range) -> Iterator[int]:
    """The numbers in order, and from the beginning again; ``next`` is one step for all threads."""
    return itertools.chain.from_iterable(itertools.repeat(numbers))


class _Kind(NamedTuple):
    """The number of a kind of call, and the numbers of the calls on its group."""

    number: int
    calls: Iterator[int]


class Recorder:
    """The recording of this rank. The file is made when the rank is known: at the first call."""

    def __init__(self, path: Path, calls: int) -> None:
        self.path, self.calls = path, calls
        end = HEADER_BYTES + calls * EVENT_BYTES
        self._slots = _again_and_again(range(HEADER_BYTES, end, EVENT_BYTES))
        self._kinds: dict[Any, _Kind] = {}
        # By identity, for calls made again.
        self._prepared: dict[Any, tuple[int, Iterator[int], Call, Choice]] = {}
        self._groups: dict[Any, tuple[int, Iterator[int]]] = {}
        self._threads: dict[int, int] = {}
        self._errors = itertools.count()
        self._lock = threading.RLock()
        self._memory: Any = None
        self._table: Any = None

    def begin(  # noqa: PLR0917
        self,
        operation: str,
        algorithm: str,
        root: int,
        call: Call,
        dtype: torch.dtype,
        on_host: bool,
        nbytes: int,
        event: int = 0,
    ) -> int:
        """Write the beginning of a call; the result stands for it in ``end`` and ``fail``.

        Given the ``event`` of a call that has begun before its algorithm was known, write its kind.
        """
        kind = self._kind(operation, algorithm, root, call, dtype, on_host)
        if event:
            _KIND.pack_into(self._memory, event + EVENT_BYTES - _KIND.size, kind.number)
            return event
        at, about = next(self._slots), (nbytes >> 32, nbytes & 0xFFFFFFFF)
        _write_begin(self._memory, at, monotonic_ns(), *about, next(kind.calls), kind.number)
        return at

    def begin_again(self, choice: Choice, root: int, call: Call, x: Tensor) -> int:
        """The same for a call that may have been made before, by the same ``Call``.

        Its kind is found by what the objects are, which is faster than by what they hold.
        """
        backward = in_backward() if _QUEUE.pending else graph_task() != -1
        key = id(call), id(choice), root, backward, get_ident()
        found = self._prepared.get(key)
        if found is None:
            what = choice.operation, choice.algorithm.name
            number, calls = self._kind(*what, root, call, x.dtype, x.is_cpu)
            if len(self._prepared) >= _MOST_PREPARED:
                self._prepared.clear()
            # The objects are kept, so that nothing else gets their ids.
            found = self._prepared[key] = number, calls, call, choice
        nbytes, at = x.nbytes, next(self._slots)
        about = nbytes >> 32, nbytes & 0xFFFFFFFF, next(found[1]), found[0]
        _write_begin(self._memory, at, monotonic_ns(), *about)
        return at

    def end(self, event: int, nbytes: int) -> None:
        """Write the end of a call, and the bytes of its result."""
        _write_end(self._memory, event + 8, monotonic_ns(), nbytes & 0xFFFFFFFF, nbytes >> 32)

    def fail(self, event: int, error: BaseException) -> None:
        """Write the end of a call that raised."""
        _TIME.pack_into(self._memory, event + 8, monotonic_ns() | FAILED)
        if next(self._errors) < _MOST_ERRORS:
            (start,) = _TIME.unpack_from(self._memory, event)
            self._write(error=f"{type(error).__name__}: {error}"[:2000], start=start)

    def open(self) -> None:
        """Make the file. One of an earlier recording in its place is replaced."""
        size = HEADER_BYTES + self.calls * EVENT_BYTES
        final = self.path / f"rank-{world_rank()}.allgrad"
        made = final.with_suffix(f".{os.getpid()}")
        file = made.open("wb+", buffering=0)
        if hasattr(os, "posix_fallocate"):
            # A write into mapped memory that the disk has no room for would end the process.
            os.posix_fallocate(file.fileno(), 0, size)
        file.truncate(size)
        header = MAGIC + json.dumps(self._header()).encode()
        file.write(header[:CLOSED_AT])
        file.seek(size)
        self._memory = mmap.mmap(file.fileno(), size)
        self._table = file
        made.replace(final)

    def close(self, error: BaseException | None = None) -> None:
        """Mark the recording as ended, by an error or without one.

        The memory stays until calls of other threads have ended.
        """
        if self._memory is not None:
            if error is not None:
                self._write(ended=f"{type(error).__name__}: {error}"[:2000], site=error_site(error))
            _TIME.pack_into(self._memory, CLOSED_AT, monotonic_ns())

    def _header(self) -> dict[str, Any]:
        # Two clocks at once: ranks on one host share the monotonic one, those on other hosts do not.
        return {
            "rank": world_rank(),
            "world": world_size(),
            "calls": self.calls,
            "host": socket.gethostname(),
            "boot": boot(),
            "process": os.getpid(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0,
            "wall": time.time_ns(),
            "monotonic": monotonic_ns(),
            "allgrad": __version__,
            "torch": torch.__version__,
        }

    def _kind(  # noqa: PLR0917
        self,
        operation: str,
        algorithm: str,
        root: int,
        call: Call,
        dtype: torch.dtype,
        on_host: bool,
    ) -> _Kind:
        about = operation, algorithm, root, dtype, on_host
        key = call.group, call.name, call.site, *about, in_backward(), get_ident()
        return self._kinds.get(key) or self._new_kind(key)

    def _new_kind(self, key: Any) -> _Kind:
        group, name, site, operation, algorithm, root, dtype, on_host, backward, thread = key
        with self._lock:
            if key in self._kinds:
                return self._kinds[key]
            if self._memory is None:
                self._open_or_give_up()
            if group not in self._groups:
                self._new_group(group)
            if thread not in self._threads:
                self._threads[thread] = len(self._threads)
                self._write(thread=self._threads[thread], name=threading.current_thread().name)
            number, calls = self._groups[group]
            found = self._kinds[key] = _Kind(len(self._kinds) + 1, calls)
            self._write(
                kind=found.number,
                name=name,
                operation=operation,
                algorithm=algorithm,
                site=site or call_site(),
                group=number,
                root=root,
                dtype=str(dtype).removeprefix("torch."),
                host=on_host,
                backward=backward,
                thread=self._threads[thread],
            )
            return found

    def _new_group(self, group: Any) -> None:
        number = len(self._groups)
        self._groups[group] = number, _again_and_again(range(1 << 32))
        self._write(group=number, name=group.name, members=group.members, rank=group.rank)

    def _open_or_give_up(self) -> None:
        try:
            self.open()
        except OSError as error:  # a job does not end for its recording
            warnings.warn(f"allgrad: nothing is recorded: {error}", stacklevel=2)
            self._memory = mmap.mmap(-1, HEADER_BYTES + self.calls * EVENT_BYTES)
            if STATE.recorder is self:
                STATE.recorder = None
                locate_calls(False)

    def _write(self, **entry: Any) -> None:
        with self._lock:
            if self._table is not None:
                self._table.write(json.dumps(entry).encode() + b"\n")


def boot() -> str:
    """A name for this run of this machine: processes with the same one share a clock."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


@contextlib.contextmanager
def recorded(path: str | os.PathLike[str], *, calls: int = _DEFAULT_CALLS) -> Generator[None]:
    """Within this block, write every wire call of this rank to a file in the directory ``path``.

        rank 0   all_gather  |=====waits=====|==|          path/rank-0.allgrad
        rank 1   all_gather       |==waits===|==|   --->   path/rank-1.allgrad
        rank 2   all_gather                  |==|          path/rank-2.allgrad

    ``allgrad report path`` shows them: which rank the others waited for, the slowest calls, bytes
    by line, and the last call of each rank when a job hangs. The files can be read while the job
    runs and after it was killed.

    The last ``calls`` calls are kept, at 36 bytes each. Use it on every rank or on none, from the
    same call on. A file of an earlier recording in the same directory is replaced.
    ``ALLGRAD_RECORD=path`` records the whole program, ``ALLGRAD_RECORD_CALLS`` sets ``calls``.

    Cost: about 10 microseconds of processor time a call; nothing is sent.
    """
    if torch.compiler.is_compiling():
        raise ModeError(
            "recorded: a block cannot be compiled.\nCall the compiled function inside it."
        )
    recorder = Recorder(_directory(path), _checked_calls(calls, "calls"))
    if world_size() > 1:
        try:
            recorder.open()
        except OSError as error:
            raise InputError(
                f"recorded: cannot make a file of {calls} calls in {path}: {error}.\n"
                "Give a directory that this rank may write to, with room for 36 bytes a call."
            ) from error
    before, ended_by = STATE.recorder, None
    _switch(recorder)
    try:
        yield
    except BaseException as error:
        ended_by = error
        raise
    finally:
        _switch(before)
        recorder.close(ended_by)


def _switch(recorder: Recorder | None) -> None:
    if (recorder is None) != (STATE.recorder is None):
        locate_calls(recorder is not None)
    STATE.recorder = recorder


def _directory(path: str | os.PathLike[str]) -> Path:
    try:
        found = Path(path)
        found.mkdir(parents=True, exist_ok=True)
    except (OSError, TypeError) as error:
        raise InputError(
            f"recorded: cannot make the directory {path!r}: {error}.\n"
            "Give a directory that this rank may write to."
        ) from error
    return found


def _checked_calls(calls: object, name: str) -> int:
    number = int(calls) if isinstance(calls, int | str) and str(calls).isdecimal() else 0
    if not 1 <= number <= 1 << 31:
        raise InputError(f"recorded: {name}={calls!r} is not a number of calls.\nGive 1 or more.")
    return number


def _record_whole_program(path: str) -> None:
    calls = os.environ.get(_ENVIRONMENT_CALLS, _DEFAULT_CALLS)
    recorder = Recorder(_directory(path), _checked_calls(calls, _ENVIRONMENT_CALLS))
    _switch(recorder)
    # Python keeps the error that ended the program, if one did, before it runs these functions.
    atexit.register(lambda: recorder.close(getattr(sys, "last_value", None)))


if os.environ.get(_ENVIRONMENT):
    _record_whole_program(os.environ[_ENVIRONMENT])
