"""Who is told of each wire call: the recording, torch.profiler, and the logger ``allgrad``.

``primitives`` asks in every call whether anybody listens; only then a call comes through here. The
logger counts as listening when its own level is set, so that a program that logs everything at the
root is not flooded.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any

import torch

from allgrad._core import call_queue
from allgrad._core.torch_internals import PROFILER, PROFILING
from allgrad._wire.calls import call_site

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from torch import Tensor

    from allgrad._wire.algorithms import Choice
    from allgrad._wire.calls import Call
    from allgrad._wire.primitives import WireCall
    from allgrad._wire.recorder import Recorder

    Begun = tuple[Recorder, int]  # an event that was written before

__all__ = ["LOGGER", "STATE", "is_observed", "prepare", "refuse", "run", "start"]

LOGGER = logging.getLogger("allgrad")


class _State:
    """The recording in force."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None


STATE = _State()


def is_observed() -> bool:
    """Tell whether anybody listens."""
    return STATE.recorder is not None or bool(PROFILER[PROFILING]) or LOGGER.level > 0


def prepare(operation: str, call: Call, x: Tensor, meet: Callable[[Call], object]) -> Begun | None:
    """Record a call from before ``meet``: in the first one of a group, the ranks meet before it.

    A rank that does not come to it is waited for there.
    """
    recorder = STATE.recorder
    if recorder is None:
        meet(call)
        return None
    event = recorder.begin(operation, "not chosen yet", -1, call, x.dtype, x.is_cpu, x.nbytes)
    try:
        meet(call)
    except BaseException as error:
        recorder.fail(event, error)
        raise
    return recorder, event


def run(  # noqa: PLR0917
    choice: Choice, root: int, call: Call, x: Tensor, args: Sequence[Any], begun: Begun | None
) -> Tensor:
    """Run a call by the algorithm chosen for it, and tell everybody who listens."""
    if PROFILER[PROFILING] or begun is not None or LOGGER.isEnabledFor(logging.DEBUG):
        with _told(choice.operation, choice.algorithm.name, root, call, x, begun) as result:
            result.append(choice.run(call, x, *args))
        return result[0]
    if STATE.recorder is None:
        return choice.run(call, x, *args)
    return STATE.recorder.record(choice, root, call, x, args)


def start(  # noqa: PLR0917
    operation: str,
    algorithm: str,
    root: int,
    call: Call,
    x: Tensor,
    begin: Callable[[], Callable[[], None]],
) -> Callable[[], None]:
    """Start a call that is waited for later; it has ended when its wait has."""
    with contextlib.ExitStack() as undone:
        result = undone.enter_context(_told(operation, algorithm, root, call, x))
        wait = begin()
        telling = undone.pop_all()

    def wait_and_tell() -> None:
        with telling:
            wait()
            result.append(x)

    return wait_and_tell


def refuse(call: Call, planned: WireCall, error: Exception) -> None:
    """Tell of a call that the ranks did not agree on, so that nothing was sent."""
    recorder, send = STATE.recorder, planned.send
    if recorder is not None:
        gathers = planned.operation == "all_gather"
        elements = planned.elements + (send[call.rank] if gathers else sum(send))
        about = planned.dtype, True, elements * planned.dtype.itemsize
        recorder.fail(recorder.begin(planned.operation, "none", planned.root, call, *about), error)


@contextlib.contextmanager
def _told(  # noqa: PLR0917
    operation: str, algorithm: str, root: int, call: Call, x: Tensor, begun: Begun | None = None
) -> Generator[list[Tensor]]:
    """Tell everybody who listens, before and after; the block appends the result."""
    recorder, event = begun or (STATE.recorder, 0)
    result = list[Any]()
    backward = " backward" if call_queue.in_backward() else ""
    dtype = str(x.dtype).removeprefix("torch.")
    about = f"{operation} by {algorithm}, {x.nbytes} bytes of {dtype}, {_group(call)}"
    logs = LOGGER.isEnabledFor(logging.DEBUG)
    if logs:
        LOGGER.debug("%s%s: %s, %s", call.name, backward, about, call.site or call_site())
    began = time.monotonic()
    with contextlib.ExitStack() as scope:
        if PROFILER[PROFILING]:
            # Two ranges: one name for all calls alike, which the profiler sums up, and in it the rest.
            # The arguments of record_function do not get into traces.
            for name in (f"allgrad::{call.name}{backward}", about):
                scope.enter_context(torch.profiler.record_function(name))
        if recorder is not None:
            what = x.dtype, x.is_cpu, x.nbytes
            event = recorder.begin(operation, algorithm, root, call, *what, event)
        try:
            yield result
        except BaseException as error:
            if recorder is not None:
                recorder.fail(event, error)
            if logs:
                took = time.monotonic() - began
                LOGGER.debug("%s%s: %s", call.name, backward, _failed(error, took))
            raise
        if recorder is not None:
            recorder.end(event, result[0].nbytes)
    if logs:
        LOGGER.debug("%s%s: %.3f ms", call.name, backward, (time.monotonic() - began) * 1e3)


def _group(call: Call) -> str:
    return f"rank {call.rank} of {call.size} in group {call.group.name}"


def _failed(error: BaseException, seconds: float) -> str:
    return f"{type(error).__name__} after {seconds * 1e3:.3f} ms"
