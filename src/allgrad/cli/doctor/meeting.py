"""The ranks of a job meet in its store, phase by phase, before and after there is a world.

    rank 0   brings its facts    reads those of all ranks: go        -> next phase
    rank 1   brings its facts    waits for what rank 0 decides: go   -> next phase
    rank 2   (never starts)      at the deadline: stop, ranks 0 and 1 came

Only rank 0 reads what all ranks bring, so the work is linear in the ranks. When it is rank 0 that
does not come, the lowest rank that did takes its place, after the deadline.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from allgrad._wire.probe import SharedStore
from allgrad._wire.store import ask
from allgrad.cli.doctor.findings import Finding, problem

if TYPE_CHECKING:
    from allgrad.cli.doctor.launch import Launch

__all__ = ["Meeting", "Phase", "reach_store"]

_GRACE = 2.0  # seconds after the deadline for what rank 0 decides at the deadline to arrive
_EVERY = 0.1


@dataclass(frozen=True, slots=True)
class Phase:
    """What the ranks brought, on the rank that reports; elsewhere what rank 0 decided."""

    brought: dict[int, Any] | None
    decision: Any


class Meeting:
    """The part of this rank in the phases of one examination."""

    def __init__(self, store: SharedStore, rank: int, size: int, until: float) -> None:
        """``until`` is a time of ``time.monotonic``."""
        self.store, self.rank, self.size, self.until = store, rank, size, until

    def left(self) -> float:
        """Seconds until the deadline; a little is always left for what is there already."""
        return max(0.05, self.until - time.monotonic())

    def bring(self, name: str, value: Any) -> Phase:
        """Write this rank's value; rank 0 collects all of them, the others wait for its decision."""
        own = json.dumps(value)
        self.store.put(f"{name}/{self.rank}", own)
        if self.rank == 0:
            return Phase(self.collect(name, self.left()), None)
        decided = self.store.wait(f"{name}/decision", self.left() + _GRACE)
        if decided is not None:
            return Phase(None, _parsed(decided))
        came = {self.rank: _parsed(own)} | self.collect(name, 0.0)
        return Phase(came if min(came) == self.rank else None, "stop")

    def decide(self, name: str, decision: Any) -> None:
        """Rank 0 tells the others how to go on."""
        self.store.put(f"{name}/decision", json.dumps(decision))

    def leave(self, seconds: float) -> None:
        """Whoever serves the store stays until the others have read what they need."""
        self.store.put(f"left/{self.rank}", "")
        if self.rank == 0:
            until = time.monotonic() + seconds
            for rank in range(1, self.size):
                if self.store.get(f"reached/{rank}") is not None:
                    self.store.wait(f"left/{rank}", until - time.monotonic())

    def listener_of(self, name: str, rank: int) -> str:
        """Where a rank listens, as it told in this phase."""
        brought = _parsed(self.store.get(f"{name}/{rank}") or "")
        return str(brought.get("at", "")) if isinstance(brought, dict) else ""

    def collect(self, name: str, seconds: float) -> dict[int, Any]:
        """The values of the ranks that came within so many seconds, as far as the store answers."""
        until, came = time.monotonic() + seconds, {}
        with contextlib.suppress(RuntimeError):  # the store is gone, or silent
            for rank in range(self.size):
                text = self._read(f"{name}/{rank}", until - time.monotonic())
                if text is not None:
                    came[rank] = _parsed(text)
        return came

    def _read(self, key: str, seconds: float) -> str | None:
        """Wait for a text; after the time, a busy store still gets time to tell whether it is there."""
        if seconds > 0:
            return self.store.wait(key, seconds)
        return ask(self.store.torch_store, lambda: self.store.get(key))


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def reach_store(launch: Launch, seconds: float) -> tuple[SharedStore, float] | Finding:
    """Connect to the job's store, with the seconds of one exchange; or what is in the way."""
    where, until = f"{launch.host}:{launch.port}", time.monotonic() + seconds
    if not launch.serves_store:
        refusal = _wait_for_port(launch.host, launch.port, until)
        if refusal is not None:
            return problem("store", f"{where}: {refusal[0]}", *refusal[1:])
    try:
        store = SharedStore(
            launch.host,
            launch.port,
            serve=launch.serves_store,
            seconds=max(1.0, until - time.monotonic()),
            name=f"allgrad doctor/{launch.attempt}",
        )
        began = time.perf_counter()
        store.put(f"reached/{launch.rank}", "")
        store.get(f"reached/{launch.rank}")  # a write alone does not wait for the store
        return store, time.perf_counter() - began
    except RuntimeError as error:
        reason = str(error).splitlines()[0][:200]
        if launch.serves_store:
            advice = "Stop what uses the port, or set MASTER_PORT to a free one."
            return problem("store", f"{where}: {reason}", "Rank 0 cannot serve the store.", advice)
        return problem(
            "store",
            f"{where}: {reason}",
            "Something listens there that is no store of torch.distributed.",
            "Set MASTER_ADDR and MASTER_PORT to the host and port of rank 0's store.",
        )


def _wait_for_port(host: str, port: int, until: float) -> tuple[str, str, str] | None:
    """Wait until something listens; else what was seen, what it means and what to do."""
    while True:
        try:
            with socket.create_connection((host, port), max(0.1, until - time.monotonic())):
                return None
        except socket.gaierror:
            seen = (
                "this name has no address",
                "The name of the store's host is unknown on this host.",
                "Set MASTER_ADDR to an address, or to a name that getent hosts NAME finds here.",
            )
        except TimeoutError:
            seen = (
                "no answer",
                "A firewall drops the connection, or the host is down or on another network.",
                "Open the port between the hosts, or set MASTER_ADDR to an address of a shared network.",
            )
        except OSError as error:
            seen = (
                (error.strerror or str(error)).lower(),
                "Nothing listens there: rank 0, or the launcher, has not started, or has ended.",
                "Look at rank 0's output; give every host the same MASTER_ADDR and MASTER_PORT.",
            )
        if time.monotonic() + _EVERY > until:
            return seen
        time.sleep(_EVERY)
