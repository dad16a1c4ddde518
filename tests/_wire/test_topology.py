"""Ranks by host: found out once for each group, or named by the environment."""

import os
import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import allgrad as ag
from allgrad._wire.groups import find_group
from allgrad._wire.topology import by_host
from traffic import Traffic


def test_hosts_have_the_order_of_their_lowest_ranks():
    assert by_host(["b", "a", "b", "c", "a"]) == ((0, 2), (1, 4), (3,))


@pytest.mark.ranks(3)
def test_ranks_of_one_machine_are_on_one_host(rank):
    ag.all_reduce(torch.ones(1))
    found = find_group("test", None).topology
    assert found.hosts == ((0, 1, 2),)
    assert found.names == (socket.gethostname(),)
    assert found.processes[rank] == os.getpid()
    assert found.crowded == (len(os.sched_getaffinity(0)) < 3)


@pytest.mark.ranks(3)
def test_the_environment_names_hosts(rank, monkeypatch):
    monkeypatch.setenv("ALLGRAD_HOST", "left" if rank == 1 else "right")
    group = dist.new_group(timeout=timedelta(seconds=20))
    assert ag.all_gather(torch.ones(rank), group=group).shape == (3,)
    found = find_group("test", group).topology
    assert (found.hosts, found.names) == (((0, 2), (1,)), ("right", "left"))
    assert [found.name_of(r) for r in range(3)] == ["right", "left", "right"]


@pytest.mark.ranks(3)
def test_a_group_asks_once(rank):
    group = dist.new_group()
    x = torch.ones(2)
    with Traffic() as first:
        ag.all_reduce(x, group=group)
    with Traffic() as second:
        ag.all_reduce(x, group=group)
    assert first.calls["all_to_all_single"] == 1
    assert second.calls["all_to_all_single"] == 0
