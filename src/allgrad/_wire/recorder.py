"""The file of a recording: every wire call of a rank, written so that it outlives the process.

    rank-3.allgrad
        0      magic, then the header: JSON, padded with zeros
        4088   when the recording ended, in ns; 0 while it runs, and after a crash
        4096   the ring: ``calls`` events of 32 bytes, the oldest overwritten first
        then   the table: JSON, one line for each kind of call, group, thread and error, and what
               ended the program

The ring is mapped memory: what was written is in the file the moment it is written, also when the
process is killed, and other processes can read it meanwhile. An event is four words of 64 bits:

    start     in ns, written when the call begins
    end       in ns, written when the call ends; what stands there before is earlier than the start
    bytes     of the input (low half) and of the result (high half), ``LARGE`` where the kind has them
    what      number of the call on its group (low half) and kind (high half)

What calls have in common (name, line, algorithm, group and more) is a *kind*, written to the table
once. Nothing is sent: ``report`` aligns the ranks' clocks.

After each wait for other ranks the caches are cold, so that time goes by the memory and code that a
call touches, more than by instructions: hence whole words, and the kind that followed last time is tried first.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import socket
import threading
import time
import warnings
from pathlib import Path
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from allgrad._core.call_queue import QUEUES as _QUEUES
from allgrad._core.call_queue import in_backward
from allgrad._core.torch_internals import graph_task
from allgrad._core.version import __version__
from allgrad._wire.calls import call_site, error_site, locate_calls
from allgrad._wire.groups import world_rank, world_size
from allgrad._wire.observers import STATE
from allgrad.errors import in_words

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from allgrad._wire.algorithms import Choice
    from allgrad._wire.calls import Call
    from allgrad._wire.groups import Group

__all__ = [
    "CLOSED_AT",
    "EVENT_BYTES",
    "FAILED",
    "HEADER_BYTES",
    "LARGE",
    "MAGIC",
    "Recorder",
    "boot",
]

MAGIC = b"allgrad recording 2\n"
HEADER_BYTES, CLOSED_AT, EVENT_BYTES = 4096, 4088, 32
_WORD, _EVENT_WORDS = 8, EVENT_BYTES // 8
_LOW = (1 << 32) - 1
LARGE = _LOW  # in place of a number of bytes that has more than 32 bits; the kind has it
FAILED = 1 << 63  # in the end of a call that raised
_MOST_ERRORS, _MOST_KNOWN = 1000, 1024


def _again_and_again(numbers: range) -> Iterator[int]:
    """The numbers in order, and from the beginning again; ``next`` is one step for all threads."""
    return itertools.chain.from_iterable(itertools.repeat(numbers))


class _Key(NamedTuple):
    """What calls of one kind have in common."""

    group: Group
    name: str
    site: str
    operation: str
    algorithm: str
    root: int
    dtype: torch.dtype
    host: bool
    backward: bool
    thread: int
    sent: int = 0  # bytes, where an event has no room for them
    received: int = 0


class _Kind(NamedTuple):
    """The number of a kind of call, in the high half of a word, and the calls on its group."""

    high: int
    calls: Iterator[int]


class _Known:
    """A call that was made before: what it is recognised by, what is written, and what came after it."""

    __slots__ = ("after", "backward", "call", "calls", "choice", "high", "nbytes", "root", "thread")

    after: _Known
    call: Call | None
    choice: Choice
    root: int
    backward: bool
    thread: int
    high: int
    calls: Iterator[int]
    nbytes: int  # as in an event; -1 where they differ from call to call

    def __init__(self) -> None:
        """The beginning of a program: no call is like it."""
        self.call, self.after = None, self


class Recorder:
    """The recording of this rank. The file is made when the rank is known: at the first call."""

    def __init__(self, path: Path, calls: int) -> None:
        self.path, self.calls = path, calls
        self._size = HEADER_BYTES + calls * EVENT_BYTES
        words = range(HEADER_BYTES // _WORD, self._size // _WORD, _EVENT_WORDS)
        self._slots = _again_and_again(words)
        self._kinds: dict[_Key, _Kind] = {}
        self._keys: list[_Key] = []
        self._known: dict[Any, _Known] = {}
        self._last = _Known()
        self._groups: dict[Any, tuple[int, Iterator[int]]] = {}
        self._threads: dict[int, int] = {}
        self._errors = itertools.count()
        self._lock = threading.RLock()
        self._words: Any = None
        self._table: Any = None

    def record(
        self, choice: Choice, root: int, call: Call, x: Tensor, args: Sequence[Any]
    ) -> Tensor:
        """Run a call by the algorithm chosen for it, and write when it begins and ends."""
        backward = in_backward() if _QUEUES.pending else graph_task() != -1
        known = self._last.after
        if (
            (known.call is not call and known.call != call)
            or known.choice is not choice
            or known.backward is not backward
            or known.root != root
            or known.thread != get_ident()
        ):
            known = self._find(choice, root, call, x, backward)
        self._last = known
        at, words, nbytes = next(self._slots), self._words, known.nbytes
        words[at] = monotonic_ns()
        words[at + 2] = nbytes if nbytes >= 0 else min(x.nbytes, LARGE)
        words[at + 3] = known.high + next(known.calls)
        if nbytes < 0 and x.nbytes >= LARGE:
            self._change_kind(at, sent=x.nbytes)
        try:
            out = choice.run(call, x, *args)
        except BaseException as error:
            self.fail(at, error)
            raise
        if nbytes >= 0:
            words[at + 1] = monotonic_ns()
        else:
            self.end(at, out.nbytes)
        return out

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
        about = operation, algorithm, root, dtype, on_host, in_backward(), get_ident()
        kind = self._kind(_Key(call.group, call.name, call.site, *about))
        words = self._words
        if event:
            words[event + 3] = kind.high + (words[event + 3] & _LOW)
            return event
        at = next(self._slots)
        words[at], words[at + 2] = monotonic_ns(), min(nbytes, LARGE)
        words[at + 3] = kind.high + next(kind.calls)
        if nbytes >= LARGE:
            self._change_kind(at, sent=nbytes)
        return at

    def end(self, event: int, nbytes: int) -> None:
        """Write the end of a call, and the bytes of its result."""
        words = self._words
        if nbytes >= LARGE:
            self._change_kind(event, received=nbytes)
        words[event + 2] = (words[event + 2] & _LOW) | min(nbytes, LARGE) << 32
        words[event + 1] = monotonic_ns()

    def fail(self, event: int, error: BaseException) -> None:
        """Write the end of a call that raised."""
        self._words[event + 1] = monotonic_ns() | FAILED
        if next(self._errors) < _MOST_ERRORS:
            self._write(error=in_words(error)[:2000], start=self._words[event])

    def open(self) -> None:
        """Make the file. One of an earlier recording in its place is replaced."""
        size = self._size
        final = self.path / f"rank-{world_rank()}.allgrad"
        made = final.with_suffix(f".{os.getpid()}")
        file = made.open("wb+", buffering=0)
        if hasattr(os, "posix_fallocate"):
            # A write into mapped memory that the disk has no room for would end the process.
            try:
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError:
                made.unlink()
                raise
        file.truncate(size)
        header = MAGIC + json.dumps(self._header()).encode()
        file.write(header[:CLOSED_AT])
        file.seek(size)
        self._words = memoryview(mmap.mmap(file.fileno(), size)).cast("Q")
        self._table = file
        made.replace(final)

    def close(self, error: BaseException | None = None) -> None:
        """Mark the recording as ended, by an error or without one.

        The memory stays until calls of other threads have ended.
        """
        if self._words is not None:
            if error is not None:
                self._write(ended=in_words(error)[:2000], site=error_site(error))
            self._words[CLOSED_AT // _WORD] = monotonic_ns()

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

    def _find(self, choice: Choice, root: int, call: Call, x: Tensor, backward: bool) -> _Known:
        """What is known of a call that did not come after the last one before."""
        here, before = get_ident(), self._last
        key = call.group, call.name, call.site, choice, root, backward, here
        known = self._known.get(key)
        if known is None:
            about = choice.operation, choice.algorithm.name, root, x.dtype, x.is_cpu, backward, here
            kind = self._kind(_Key(call.group, call.name, call.site, *about))
            known = _Known()
            known.call, known.choice, known.root = call, choice, root
            known.backward, known.thread = backward, here
            known.high, known.calls = kind
            sent, received = choice.nbytes or (LARGE, LARGE)
            known.nbytes = -1 if max(sent, received) >= LARGE else sent | received << 32
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[key] = known
        before.after = known
        return known

    def _kind(self, key: _Key) -> _Kind:
        return self._kinds.get(key) or self._new_kind(key)

    def _new_kind(self, key: _Key) -> _Kind:
        with self._lock:
            if key in self._kinds:
                return self._kinds[key]
            if self._words is None:
                self._open_or_give_up()
            if key.group not in self._groups:
                self._new_group(key.group)
            if key.thread not in self._threads:
                self._threads[key.thread] = len(self._threads)
                name = threading.current_thread().name
                self._write(thread=self._threads[key.thread], name=name)
            group, calls = self._groups[key.group]
            self._keys.append(key)
            found = self._kinds[key] = _Kind(len(self._keys) << 32, calls)
            entry = key._asdict() | {
                "kind": len(self._keys),
                "site": key.site or call_site(),
                "group": group,
                "dtype": str(key.dtype).removeprefix("torch."),
                "thread": self._threads[key.thread],
            }
            self._write(**entry)
            return found

    def _change_kind(self, event: int, **nbytes: int) -> None:
        """Let a kind tell the bytes of an event that has no room for them."""
        what = self._words[event + 3]
        key = self._keys[(what >> 32) - 1]._replace(**nbytes)
        self._words[event + 3] = self._kind(key).high + (what & _LOW)

    def _new_group(self, group: Any) -> None:
        number = len(self._groups)
        self._groups[group] = number, _again_and_again(range(_LOW + 1))
        self._write(group=number, name=group.name, members=group.members, rank=group.rank)

    def _open_or_give_up(self) -> None:
        try:
            self.open()
        except OSError as error:  # a job does not end for its recording
            warnings.warn(f"allgrad: nothing is recorded: {error}", stacklevel=2)
            self._words = memoryview(mmap.mmap(-1, self._size)).cast("Q")
            if STATE.recorder is self:
                STATE.recorder = None
                locate_calls(False)

    def _write(self, **entry: Any) -> None:
        with self._lock:
            if self._table is None:
                return
            line = json.dumps(entry).encode() + b"\n"
            try:
                whole = self._table.write(line) == len(line)
            except OSError:
                whole = False
            if not whole:  # a job does not end for its recording; a reader leaves out half a line
                self._table = None
                message = f"allgrad: {self.path} is full: new kinds of calls are not recorded."
                warnings.warn(message, stacklevel=2)


def boot() -> str:
    """A name for this run of this machine: processes with the same one share a clock."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()
