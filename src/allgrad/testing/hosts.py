"""Several hosts on one machine: a network namespace each, joined by links whose rate is limited.

    host 0 -- eth0 ------ port0 +--------+
    host 1 -- eth0 ------ port1 | switch |      each box is a network namespace
    host 2 -- eth0 ------ port2 +--------+

Ranks run inside, with a host name of their own. Everything is taken down by a process that waits
for this one to end, however it ends.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from allgrad._wire.world import Rendezvous
from allgrad.errors import AllgradError, InputError
from allgrad.testing.pool import Pool, Worker
from allgrad.testing.ranks import run_in

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType
    from typing import Self

__all__ = ["Hosts", "HostsUnavailable", "why_no_hosts"]

T = TypeVar("T")

_NAMESPACES = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_QUEUE = ("burst", "64kb", "latency", "100ms")  # what waits longer for its turn is dropped
_TAKE_DOWN = """
trap '' INT TERM HUP
cat > /dev/null
for name in "$@"; do ip netns delete "$name"; done
"""
_NAMED = 'hostname "$0"; exec "$@"'
_SETTINGS = {
    "GLOO_SOCKET_IFNAME": "eth0",
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # addresses here have no names, of which torch warns
}
_numbers = count()


class HostsUnavailable(AllgradError):
    """Hosts cannot be made on this machine."""


@functools.cache
def why_no_hosts() -> str:
    """Tell why hosts cannot be made here; an empty string if they can."""
    if sys.platform != "linux":
        return f"network namespaces are of Linux, and this is {sys.platform}"
    missing = [name for name in ("ip", "tc", "unshare", "hostname") if not shutil.which(name)]
    if missing:
        return f"there is no command {' or '.join(missing)} (iproute2, util-linux)"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    try:
        with Hosts(1, rate="1gbit"):
            return ""
    except HostsUnavailable as error:
        return str(error)


class Hosts:
    """Hosts with ranks on them; use it in a ``with`` statement.

        with Hosts(2, ranks_per_host=2, rate="200mbit") as hosts:
            hosts.run(fn)

        host 0   rank 0, rank 1
        host 1   rank 2, rank 3

    ``rate`` is that of every host's link, each way, as ``tc`` writes it; links are as fast as this
    machine if it is not given. Raises ``HostsUnavailable`` where ``why_no_hosts`` gives a reason.
    """

    def __init__(self, hosts: int, *, ranks_per_host: int = 1, rate: str | None = None) -> None:
        """Make nothing yet."""
        if not (1 <= hosts <= 64 and ranks_per_host >= 1):
            raise InputError(
                f"Hosts: {hosts} hosts of {ranks_per_host} ranks cannot be made.\n"
                "Give 1 to 64 hosts, and at least one rank for each."
            )
        self.ranks_per_host, self.rate = ranks_per_host, rate
        prefix = f"ag{os.getpid()}-{next(_numbers)}"
        self.names = [f"{prefix}-host{host}" for host in range(hosts)]
        self._switch = f"{prefix}-switch"
        self.removed: set[int] = set()
        self._pool: Pool | None = None
        self._workers: dict[int, Worker] = {}
        self._take_down: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Make the namespaces, the links and the switch."""
        self._take_down = subprocess.Popen(  # noqa: S603
            ["/bin/sh", "-c", _TAKE_DOWN, "sh", *self.names, self._switch],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        """Kill the ranks, and take everything down."""
        self.close()

    def close(self) -> None:
        """The same without a ``with`` statement."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        if self._take_down is not None and self._take_down.stdin is not None:
            self._take_down.stdin.close()
            self._take_down.wait()
            self._take_down = None

    def run(
        self, fn: Callable[..., T], *args: Any, timeout: float = 60.0, grace: float = 2.0
    ) -> list[T]:
        """Run ``fn(*args)`` on every rank of every host, as ``run_ranks`` does.

        The ranks find each other in a store on host 0. When one has failed, the others have
        ``grace`` seconds to end by themselves.
        """
        if self._pool is None:
            rendezvous = self.inside(0, lambda: Rendezvous(self.address(0)))
            self._pool = Pool(rendezvous, self._start_worker)
        world = len(self.names) * self.ranks_per_host
        return run_in(self._pool, fn, world, args, "gloo", timeout, grace)

    def cut(self, host: int) -> None:
        """Cut the link of a host: nothing arrives any more, and nobody is told."""
        self._ip("-n", self._switch, "link", "set", f"port{host}", "nomaster")

    def restore(self, host: int) -> None:
        """Connect the link of a host again."""
        self._ip("-n", self._switch, "link", "set", f"port{host}", "master", "switch")

    def set_rate(self, rate: str) -> None:
        """Give every link another rate."""
        self.rate = rate
        for host, name in enumerate(self.names):
            for namespace, device in ((name, "eth0"), (self._switch, f"port{host}")):
                limit = ("root", "tbf", "rate", rate, *_QUEUE)
                _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, *limit)

    def remove(self, host: int) -> None:
        """Take a host away with its ranks: its link, its processes, its namespace."""
        self.removed.add(host)
        self._ip("-n", self._switch, "link", "delete", f"port{host}")
        for rank, worker in self._workers.items():
            if self.host_of(rank) == host:
                worker.kill_process()
        self._ip("netns", "delete", self.names[host])

    def command(self, host: int, words: Sequence[str]) -> tuple[str, ...]:
        """The words of a command that runs on a host, under the host's name."""
        enter = ("ip", "netns", "exec", self.names[host], "unshare", "--uts")
        return (*enter, "sh", "-c", _NAMED, f"host{host}", *words)

    def host_of(self, rank: int) -> int:
        """The host on which a rank runs."""
        return rank // self.ranks_per_host

    def address(self, host: int) -> str:
        """The address of a host; no other network has a way to it."""
        return f"10.77.0.{host + 1}"

    def bytes_sent(self, host: int) -> int:
        """How many bytes the host has put on its link so far, headers included."""
        shown = self._ip("-n", self.names[host], "-s", "-j", "link", "show", "dev", "eth0")
        return int(json.loads(shown)[0]["stats64"]["tx"]["bytes"])

    def inside(self, host: int, fn: Callable[[], T]) -> T:
        """Run a function of this process in the network of a host."""

        def moved() -> T:
            libc = ctypes.CDLL(None, use_errno=True)
            with (_NAMESPACES / self.names[host]).open() as namespace:
                if libc.setns(namespace.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            return fn()

        with ThreadPoolExecutor(1) as thread:  # a namespace belongs to a thread
            return thread.submit(moved).result()

    def _make(self) -> None:
        self._ip("netns", "add", self._switch)
        inside = ("-n", self._switch)
        self._ip(*inside, "link", "add", "name", "switch", "type", "bridge")
        self._ip(*inside, "link", "set", "switch", "up")
        for host, name in enumerate(self.names):
            port, peer = f"port{host}", ("peer", "name", "eth0", "netns", name)
            self._ip("netns", "add", name)
            self._ip(*inside, "link", "add", "name", port, "type", "veth", *peer)
            self._ip(*inside, "link", "set", port, "master", "switch", "up")
            self._ip("-n", name, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                self._ip("-n", name, "link", "set", device, "up")
        if self.rate is not None:
            self.set_rate(self.rate)

    def _start_worker(self, rank: int) -> Worker:
        self._workers[rank] = worker = Worker(self.command(self.host_of(rank), ()), _SETTINGS)
        return worker

    def _ip(self, *words: str) -> str:
        return _run("ip", *words)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise HostsUnavailable(f"{' '.join(command)}: {done.stderr.strip() or 'failed'}")
    return done.stdout
