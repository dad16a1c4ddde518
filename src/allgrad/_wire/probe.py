"""A job looked at from outside, for ``allgrad doctor``: its store, its world, one link at a time."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

__all__ = ["SharedStore", "clock_offset", "join_world", "message_seconds"]


class SharedStore:
    """Texts by key, which every rank of the job can read and write."""

    def __init__(self, host: str, port: int, *, serve: bool, seconds: float, name: str) -> None:
        """Connect, or serve the store from this process; ``RuntimeError`` after ``seconds``."""
        limit = timedelta(seconds=seconds)
        # Several stores may share the port of a launcher: it has one that all of them use.
        store = TCPStore(
            host, port, is_master=serve, wait_for_workers=False, timeout=limit, multi_tenant=True
        )
        self.torch_store: Any = PrefixStore(name, store)

    def put(self, key: str, text: str) -> None:
        """Write a text."""
        self.torch_store.set(key, text)

    def get(self, key: str) -> str | None:
        """Read a text; ``None`` if nobody has written it."""
        if not self.torch_store.check([key]):
            return None
        written: bytes = self.torch_store.get(key)
        return written.decode("utf-8", errors="replace")

    def wait(self, key: str, seconds: float) -> str | None:
        """Read a text as soon as it is there; ``None`` after so many seconds."""
        try:
            self.torch_store.wait([key], timedelta(seconds=max(0.001, seconds)))
        except RuntimeError:
            return None
        return self.get(key)


def join_world(store: SharedStore, rank: int, size: int, *, backend: str, seconds: float) -> None:
    """Start the default process group; nothing in it waits longer than ``seconds``."""
    inner = PrefixStore("world", store.torch_store)
    hook = sys.excepthook
    try:
        dist.init_process_group(
            backend, store=inner, rank=rank, world_size=size, timeout=timedelta(seconds=seconds)
        )
    finally:
        sys.excepthook = hook  # torch wraps it at every start


def message_seconds(
    peer: int, *, first: bool, nbytes: int, rounds: int, device: torch.device
) -> float:
    """The time of one message between this rank and ``peer``: half the fastest round trip."""
    message = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    fastest = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        _round_trip(message, peer, first=first)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        fastest = min(fastest, time.perf_counter() - began)
    return fastest / 2


def clock_offset(
    peer: int, *, first: bool, rounds: int, device: torch.device
) -> tuple[float, float]:
    """How far the clock of ``peer`` is ahead of this rank's, and the error of that, in seconds.

    rank 0   asks at t0 ................. has the answer at t1
    rank 1               reads its clock: T          ahead by  T - (t0 + t1) / 2
    """
    best = (0.0, float("inf"))
    message = torch.zeros(1, dtype=torch.float64, device=device)
    for _ in range(rounds):
        if first:
            before = time.time()
            _round_trip(message, peer, first=True)
            theirs, after = float(message.item()), time.time()
            best = min(
                best, (theirs - (before + after) / 2, (after - before) / 2), key=lambda p: p[1]
            )
        else:
            dist.recv(message, peer)
            dist.send(message.fill_(time.time()), peer)
    return best


def _round_trip(message: torch.Tensor, peer: int, *, first: bool) -> None:
    if first:
        dist.send(message, peer)
        dist.recv(message, peer)
    else:
        dist.recv(message, peer)
        dist.send(message, peer)
