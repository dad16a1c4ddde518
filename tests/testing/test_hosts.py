"""Hosts as network namespaces: made, joined by links, and always taken down."""

import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from allgrad.errors import InputError
from allgrad.testing import Hosts, hosts, why_no_hosts

needs_hosts = pytest.mark.skipif(why_no_hosts() != "", reason=why_no_hosts())

WAITING = """
import signal
from allgrad.testing import Hosts
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job may have been started without
with Hosts(2, rate="10mbit") as hosts:
    print(*hosts.names, flush=True)
    input()
"""


def namespaces():
    return {file.name for file in Path("/run/netns").iterdir()}


@needs_hosts
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_however_the_process_ends(how):
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    names = process.stdout.readline().split()
    assert len(names) == 2
    assert all(name in namespaces() for name in names)
    process.send_signal(how)
    process.wait(60)
    until = time.monotonic() + 10
    while any(name in namespaces() for name in names):
        assert time.monotonic() < until
        time.sleep(0.05)


@needs_hosts
def test_a_link_carries_bytes_until_it_is_cut():
    with Hosts(2) as two:

        def reaches(seconds=10):
            try:
                socket.create_connection((two.address(1), 9), timeout=seconds)
            except ConnectionRefusedError:
                return True  # there is a host that says no
            except OSError:
                return False

        before = two.bytes_sent(0)
        assert two.inside(0, reaches)
        assert two.bytes_sent(0) > before
        two.cut(1)
        assert not two.inside(0, partial(reaches, 0.5))
        two.restore(1)
        assert two.inside(0, reaches)


def test_a_reason_is_given_where_hosts_cannot_be_made(monkeypatch):
    why_no_hosts.cache_clear()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(hosts.shutil, "which", lambda name: name)
    monkeypatch.setattr(sys, "platform", "linux")
    assert "only root" in why_no_hosts()
    why_no_hosts.cache_clear()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "Linux" in why_no_hosts()
    why_no_hosts.cache_clear()


@pytest.mark.parametrize(("number", "ranks"), [(0, 1), (65, 1), (2, 0)])
def test_a_number_of_hosts_is_a_number(number, ranks):
    with pytest.raises(InputError, match="cannot be made"):
        Hosts(number, ranks_per_host=ranks)
