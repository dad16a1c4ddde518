"""The program of one rank, with two file descriptors as arguments: CONNECTION STACKS.

``CONNECTION`` is the socket to the caller, ``STACKS`` a file for stack traces. The process handles
``Enter`` and ``Call`` messages until the caller closes the connection, and then exits at once,
whatever it is doing.
"""

from __future__ import annotations

import contextlib
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

import numpy as np
import torch

from allgrad._wire import world
from allgrad.testing.failures import RankError
from allgrad.testing.messages import Call, Enter, Entered, Finished
from allgrad.testing.serialization import deserialize, fill_main, serialize


def main() -> None:
    """Handle messages until the caller closes the connection."""
    connection = Connection(int(sys.argv[1]))
    stacks = int(sys.argv[2])
    threading.Thread(target=_exit_with, args=(connection.fileno(),), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller decides, and closes the connection
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks)
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # so that collections in world.stop skip the objects of torch
    _send(connection, Entered())
    current: world.World | None = None
    while True:
        message = pickle.loads(connection.recv_bytes())  # noqa: S301 - from the process that started this one
        answer: Entered | Finished | RankError
        if isinstance(message, Enter):
            current = None  # drops the former group, so that its connections close
            current, answer = _enter(message)
        else:
            assert isinstance(message, Call)
            assert current is not None  # the caller sends Enter first
            answer = _perform(message, current)
        _send(connection, answer)
        if isinstance(answer, RankError):
            current = None
            world.stop()  # ranks that wait for this one get an error


def _enter(message: Enter) -> tuple[world.World | None, Entered | RankError]:
    try:
        current = world.World.start(
            message.rank,
            message.world,
            backend=message.backend,
            address=message.address,
            port=message.port,
            name=message.name,
        )
    except Exception as error:  # noqa: BLE001 - a backend may raise anything
        return None, RankError.of(message.rank, error, time.monotonic())
    return current, Entered()


def _perform(call: Call, current: world.World) -> Finished | RankError:
    """Run the function; return its result or its failure as a message."""
    environment = dict(os.environ)
    try:
        _reset(call, current.rank)
        function, args, witness = deserialize(call.pickled, "the function")
        fill_main(witness)
        result = function(*args)
        pickled = serialize(result, f"the result of rank {current.rank}", detach=True)
        untouched = current.untouched()
        return Finished(pickled, untouched, current.calls() if untouched else 0)
    except BaseException as error:  # noqa: BLE001 - a rank's sys.exit() is a failure too
        return RankError.of(current.rank, error, time.monotonic())
    finally:
        if os.environ != environment:
            os.environ.clear()
            os.environ.update(environment)
        for stream in (sys.stdout, sys.stderr):
            # The function may have closed or removed it: some ranks are to print nothing.
            with contextlib.suppress(AttributeError, OSError, ValueError):
                stream.flush()


def _reset(call: Call, rank: int) -> None:
    """Reset the state that an earlier call may have changed, as in a new process."""
    if sys.path != call.path:
        sys.path[:] = call.path
    os.chdir(call.directory)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)  # noqa: NPY002


def _send(connection: Connection, message: Any) -> None:
    connection.send_bytes(pickle.dumps(message))


def _exit_with(connection: int) -> None:
    """Exit as soon as the other end of the connection is closed."""
    poller = select.poll()
    poller.register(connection, 0)
    poller.poll()
    os._exit(0)
