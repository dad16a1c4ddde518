"""The program of one rank, which the pool starts with two file descriptors: the line, and the notes.

``LINE`` is the socket to the caller, ``NOTES`` a file for stacks. The process serves ``Enter`` and
``Call`` messages until the line closes, and ends at once when it does, whatever it is doing then.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import random
import select
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from allgrad._wire import world
from allgrad.testing.failures import RankError
from allgrad.testing.messages import Call, Enter, Entered, Finished
from allgrad.testing.shipping import load, ship


def main() -> None:
    """Serve one caller until it closes the line."""
    line = Connection(int(sys.argv[1]))
    notes = int(sys.argv[2])
    threading.Thread(target=_end_with, args=(line.fileno(),), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller decides, and closes the line
    faulthandler.enable(notes)
    faulthandler.register(signal.SIGUSR1, notes)
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # torch's own objects: the collections in world.stop need not look at them
    _send(line, Entered())
    place: world.World | None = None
    while True:
        message = pickle.loads(line.recv_bytes())  # noqa: S301 - from the process that started this one
        answer: Entered | Finished | RankError
        if isinstance(message, Enter):
            place = None  # it holds the former group, whose connections are to close
            place, answer = _enter(message)
        else:
            assert isinstance(message, Call)
            assert place is not None  # the caller sends Enter first
            answer = _perform(message, place)
        _send(line, answer)
        if isinstance(answer, RankError):
            place = None
            world.stop()  # the peers that wait for this rank get an error instead


def _enter(where: Enter) -> tuple[world.World | None, Entered | RankError]:
    try:
        place = world.World.start(
            where.rank, where.world, backend=where.backend, port=where.port, name=where.name
        )
    except Exception as error:  # noqa: BLE001 - a backend may raise anything
        return None, RankError.of(where.rank, error, time.monotonic())
    return place, Entered()


def _perform(call: Call, place: world.World) -> Finished | RankError:
    """Run the function; whatever happens becomes a message."""
    try:
        _settle(call, place.rank)
        function, args = load(call.packed, "the function")
        result = function(*args)
        packed = ship(result, f"the result of rank {place.rank}", detach=True)
        untouched = place.untouched()
        return Finished(packed, untouched, place.calls() if untouched else 0)
    except BaseException as error:  # noqa: BLE001 - a rank's sys.exit() is a failure too
        return RankError.of(place.rank, error, time.monotonic())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _settle(call: Call, rank: int) -> None:
    """Begin as a new process would: what an earlier call left behind must not be seen."""
    if sys.path != call.path:
        sys.path[:] = call.path
    os.chdir(call.directory)
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(rank)
    random.seed(rank)


def _send(line: Connection, message: Any) -> None:
    line.send_bytes(pickle.dumps(message))


def _end_with(line: int) -> None:
    """End this process as soon as the other end of the line is gone."""
    poller = select.poll()
    poller.register(line, 0)
    poller.poll()
    os._exit(0)
