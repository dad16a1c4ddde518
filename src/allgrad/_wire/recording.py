"""When calls are recorded: in a block, or in the whole program by ``ALLGRAD_RECORD``."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from allgrad._wire.calls import locate_calls
from allgrad._wire.groups import world_size
from allgrad._wire.observers import STATE
from allgrad._wire.recorder import Recorder
from allgrad.errors import InputError, ModeError

if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = ["recorded"]

_ENVIRONMENT, _ENVIRONMENT_CALLS = "ALLGRAD_RECORD", "ALLGRAD_RECORD_CALLS"
_DEFAULT_CALLS = 1 << 18


@contextlib.contextmanager
def recorded(path: str | os.PathLike[str], *, calls: int = _DEFAULT_CALLS) -> Generator[None]:
    """Within this block, write every wire call of this rank to a file in the directory ``path``.

        rank 0   all_gather  |=====waits=====|==|          path/rank-0.allgrad
        rank 1   all_gather       |==waits===|==|   --->   path/rank-1.allgrad
        rank 2   all_gather                  |==|          path/rank-2.allgrad

    ``allgrad report path`` shows them: which rank the others waited for, the slowest calls, bytes
    by line, and the last call of each rank when a job hangs. The files can be read while the job
    runs and after it was killed.

    The last ``calls`` calls are kept, at 32 bytes each. Use it on every rank or on none, from the
    same call on. A file of an earlier recording in the same directory is replaced. Calls of a block
    inside another one are in its own directory alone.
    ``ALLGRAD_RECORD=path`` records the whole program, ``ALLGRAD_RECORD_CALLS`` sets ``calls``.

    Cost: about 5 microseconds a call, 2 % of a small one; nothing is sent.
    """
    if torch.compiler.is_compiling():
        raise ModeError(
            "recorded: a block cannot be compiled.\nCall the compiled function inside it."
        )
    recorder = Recorder(_directory(path), _checked_calls(calls, "calls"))
    if any(one.path.resolve() == recorder.path.resolve() for one in _BEGUN):
        raise InputError(
            f"recorded: calls are already being recorded in {path}.\n"
            "Give a block inside another one, or inside ALLGRAD_RECORD, a directory of its own."
        )
    if world_size() > 1:
        try:
            recorder.open()
        except OSError as error:
            raise InputError(
                f"recorded: cannot make a file of {calls} calls in {path}: {error}.\n"
                "Give a directory that this rank may write to, with room for 32 bytes a call."
            ) from error
    ended_by = None
    _begin(recorder)
    try:
        yield
    except BaseException as error:
        ended_by = error
        raise
    finally:
        _end(recorder)
        recorder.close(ended_by)


# In force, the last one begun last. Blocks of several threads may end in any order.
_BEGUN: list[Recorder] = []
_LOCK = threading.Lock()


def _begin(recorder: Recorder) -> None:
    with _LOCK:
        _BEGUN.append(recorder)
        _switch(recorder)


def _end(recorder: Recorder) -> None:
    with _LOCK:
        _BEGUN.remove(recorder)
        _switch(_BEGUN[-1] if _BEGUN else None)


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
    calls = os.environ.get(_ENVIRONMENT_CALLS) or _DEFAULT_CALLS
    recorder = Recorder(_directory(path), _checked_calls(calls, _ENVIRONMENT_CALLS))
    _begin(recorder)
    # Python keeps the error that ended the program, if one did, before it runs these functions.
    atexit.register(lambda: recorder.close(getattr(sys, "last_value", None)))


if os.environ.get(_ENVIRONMENT):
    _record_whole_program(os.environ[_ENVIRONMENT])
