"""How long a call waits for other ranks: a deadline, and listening for other ranks' errors.

The state is read by every call. ``STATE.no_deadline`` is the fast path: calls simply wait.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from concurrent import futures
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from allgrad._core.blocks import Block, Blocks
from allgrad._core.torch_internals import backend_timeout
from allgrad._wire import diagnosis
from allgrad.errors import InputError, ModeError

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from allgrad._wire.calls import Call

__all__ = [
    "STATE",
    "close_connections",
    "deadline",
    "listening",
    "prepare",
    "seconds_allowed",
    "wait",
    "wait_for_all",
]

_LOOK_EVERY = 0.5  # seconds
_ENVIRONMENT = "ALLGRAD_DEADLINE"
_UNUSED_TAG = 0x7FFF


def _seconds(value: object, where: str, *, text: bool = False) -> float:
    is_number = hasattr(value, "__float__") and not isinstance(value, bool)
    try:
        seconds = float(value) if text or is_number else -1.0  # type: ignore[arg-type]
    except (OverflowError, TypeError, ValueError):
        seconds = -1.0
    if not 0 < seconds < 1e7:
        raise InputError(f"{where}={value!r} is not a time.\nGive seconds, more than 0.")
    return seconds


class _State:
    """The blocks with a deadline, and those that listen for other ranks, with their calls by group."""

    def __init__(self) -> None:
        given = os.environ.get(_ENVIRONMENT)
        of_program = _seconds(given, _ENVIRONMENT, text=True) if given else None
        self.deadlines: Blocks[float] = Blocks(of_program, self._update, self._end_deadline)
        self.listeners: Blocks[dict[Any, Call]] = Blocks(None, self._update, self._update)
        self.no_deadline = True  # no call of any thread has one, or listens
        self._update()

    def _update(self, _: object = None) -> None:
        self.no_deadline = not (self.deadlines.in_use or self.listeners.in_use)

    def _end_deadline(self, block: Block[float]) -> None:
        self._update()
        _restore_timeouts(block)


STATE = _State()
# The timeout that a backend had before a deadline shortened it, and the block of that deadline.
_SHORTENED: weakref.WeakKeyDictionary[Any, tuple[timedelta, Block[float]]]
_SHORTENED = weakref.WeakKeyDictionary()
_SHORTENING = threading.Lock()


@contextlib.contextmanager
def deadline(seconds: float | None) -> Generator[None]:
    """Within this block, no call waits longer than this for another rank.

    When a rank does not come, the others raise ``RankLate`` with its number; when its connection
    is gone, ``RankLost``, at once. The group cannot be used after either: destroy it and start
    again. ``None`` lifts an outer deadline. ``ALLGRAD_DEADLINE`` sets one for the whole program.

    An async call has the deadline of the place where it was started; a call that comes after it in
    the same group first waits for it.
    """
    if torch.compiler.is_compiling():
        raise ModeError(
            "deadline: a block cannot be compiled.\nCall the compiled function inside it."
        )
    with STATE.deadlines.open(None if seconds is None else _seconds(seconds, "deadline")):
        yield


def seconds_allowed() -> float | None:
    """How long a call that is made here may wait."""
    return STATE.deadlines.value()


def _restore_timeouts(block: Block[float]) -> None:
    """Give backends their own timeouts back, or the outer deadline, when a block has ended.

    Otherwise other users of the group, DDP for one, would inherit the deadline
    (test_deadline_ends_with_its_block).
    """
    with _SHORTENING:
        for process_group, (_, by) in list(_SHORTENED.items()):
            if by is block:
                _set_timeout(process_group)


def _set_timeout(process_group: Any) -> None:
    """Give a backend the timeout of a call that is made here."""
    block = STATE.deadlines.current()
    own, _ = _SHORTENED.pop(process_group, (None, None))
    if block.value is not None:
        _SHORTENED[process_group] = own or backend_timeout(process_group), block
        process_group.set_timeout(timedelta(seconds=block.value))
    elif own is not None:
        process_group.set_timeout(own)


@contextlib.contextmanager
def listening() -> Generator[dict[Any, Call]]:
    """Within this block, waiting ranks look every half second whether another one failed.

    The block gets the last call on each group that it uses.
    """
    diagnosis.withdraw_failure()
    outer = STATE.listeners.innermost()
    used = {} if outer is None or outer.value is None else outer.value
    with STATE.listeners.open(used):
        yield used


def prepare(call: Call) -> None:
    """Before a call that is not on the fast path: register the rank, and shorten the timeout.

    A backend that knows the deadline ends what it has begun, so that the group can be destroyed.
    """
    used = STATE.listeners.value()
    if used is not None:
        used[call.group.process_group] = call
    diagnosis.register(call)
    if STATE.deadlines.in_use:
        with _SHORTENING:  # the block may be another thread's, and end meanwhile
            _set_timeout(call.group.process_group)


def wait(call: Call, work: Any) -> None:
    """Wait for a pending call within the deadline, listening for other ranks' failures."""
    if work is None:
        return
    began, allowed = time.monotonic(), seconds_allowed()
    if allowed is None and STATE.listeners.value() is None:
        work.wait()
        return
    while True:
        try:
            work.wait(timedelta(seconds=_LOOK_EVERY))
        except RuntimeError:
            if work.is_completed():  # with an error of its own, or just after this wait ended
                work.wait()  # (test_call_that_completes_as_a_wait_ends_is_no_failure)
                return
            diagnosis.raise_published(call)
            if allowed is not None and time.monotonic() - began > allowed + _LOOK_EVERY:
                raise
        else:
            return


def wait_for_all(call: Call, works: Sequence[Any]) -> None:
    """The same for point-to-point messages.

    Their wait cannot be retried: one that ends early closes the connections. So another thread
    waits while this one listens.
    """
    allowed = seconds_allowed()
    until = None if allowed is None else time.monotonic() + allowed
    if STATE.listeners.value() is None:
        _wait_until(until, works)
        return
    if not works:
        return
    done: Future[None] = Future()

    def wait_aside() -> None:
        try:
            _wait_until(until, works)
            done.set_result(None)
        except BaseException as error:  # noqa: BLE001 - raised in the listening thread
            done.set_exception(error)

    thread = threading.Thread(target=wait_aside, daemon=True)
    thread.start()
    while not futures.wait([done], _LOOK_EVERY).done:
        diagnosis.raise_published(call)
    thread.join()  # it holds the tensors until it ends (test_nothing_is_kept_alive)
    done.result()


def _wait_until(until: float | None, works: Sequence[Any]) -> None:
    for work in works:
        if until is None:
            work.wait()
        else:
            work.wait(timedelta(seconds=max(1e-3, until - time.monotonic())))


def close_connections(call: Call) -> None:
    """Close this rank's connections after a point-to-point message failed.

    Ranks may wait for this one that have nothing to do with the one that failed; a closed
    connection tells them. Gloo closes all connections when a wait ends before its message came.
    """
    call.group.failed = True
    for peer in range(call.size):
        if peer != call.rank:
            with contextlib.suppress(RuntimeError):
                never_sent = call.group.process_group.recv(
                    [torch.empty(1, device="cpu")], peer, _UNUSED_TAG
                )
                never_sent.wait(timedelta(milliseconds=1))
