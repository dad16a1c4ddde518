"""What can go wrong between hosts, one function each, run by two ranks on each of two hosts.

The store is on host 0. Every rank calls ``fault()`` where the fault should happen: before the next
call, or in the middle of it.
"""

import json
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import allgrad as ag
from exactness import grads, loss, random, same

SECONDS = 2  # the deadline
LARGE = 1 << 18  # elements: half a second and more at RATE
RATE = "20mbit"
SCENARIOS = {}
LATE, LOST = "RankLate", "RankLost"


@dataclass(frozen=True)
class Scenario:
    """``body`` runs on each rank, ``fault`` in the test, when all ranks have called for it."""

    body: object
    title: str
    fault: object
    before_next_call: bool  # ranks wait for the fault
    expect: tuple  # how the ranks of host 0, and those of host 1, may end
    rate: str


def scenario(fault, *, expect=([LATE], [LOST]), before_next_call=False, rate=RATE):
    def register(body):
        title = body.__doc__.strip().rstrip(".")
        about = Scenario(body, title, fault, before_next_call, expect, rate)
        SCENARIOS[body.__name__] = about
        return body

    return register


def cut(hosts):
    hosts.cut(1)


def cut_meanwhile(hosts):
    time.sleep(0.2)
    hosts.cut(1)


def cut_in_the_roll_call(hosts):
    time.sleep(SECONDS + 0.5)
    hosts.cut(1)


def cut_and_restore(hosts):
    hosts.cut(1)
    threading.Timer(0.7, hosts.restore, [1]).start()


def remove(host):
    def removed(hosts):
        time.sleep(0.2)
        hosts.remove(host)

    return removed


def nothing(_hosts):
    pass


def piece(rank):
    return random((rank + 1, 2), rank).requires_grad_()


def joined_gradient(rank, world):
    leaves = [piece(r) for r in range(world)]
    return grads(sum(loss(torch.cat(leaves), r) for r in range(world)), leaves)[rank]


@scenario(cut_meanwhile)
def cut_in_forward(fault):
    """The link is cut in forward."""
    x = torch.ones(LARGE)
    with ag.deadline(SECONDS):
        fault()
        for _ in range(9):
            ag.all_gather(x, sizes="equal")


@scenario(cut_meanwhile)
def cut_in_backward(fault):
    """The link is cut in backward."""
    x = torch.ones(LARGE, requires_grad=True)
    with ag.deadline(SECONDS):
        y = x
        for _ in range(9):
            y = ag.share(y)
        y.register_hook(lambda _: fault())
        y.sum().backward()


@scenario(cut, before_next_call=True)
def cut_in_the_size_exchange(fault):
    """The link is cut before the sizes are exchanged."""
    with ag.deadline(SECONDS):
        fault()
        ag.all_gather(torch.ones(dist.get_rank() + 1))


@scenario(cut_in_the_roll_call, expect=([LATE, LOST], [LATE, LOST]))
def cut_in_roll_call(fault):
    """Rank 1 is late, and the link is cut while the ranks find out who is missing."""
    fault()
    with ag.deadline(SECONDS):
        if dist.get_rank() == 1:
            time.sleep(SECONDS + 2)
        ag.all_reduce(torch.ones(2))


@scenario(cut_meanwhile)
def cut_in_lockstep(fault):
    """The link is cut in a lockstep block."""
    x = torch.ones(LARGE)
    with ag.deadline(SECONDS), ag.lockstep():
        fault()
        for _ in range(9):
            ag.all_reduce(x)


@scenario(cut_meanwhile)
def cut_in_checked_calls(fault):
    """The link is cut, checked."""
    with ag.deadline(SECONDS), ag.checked():
        fault()
        while True:
            ag.broadcast(torch.ones(2))


@scenario(cut_meanwhile)
def cut_in_an_exchange(fault):
    """The link is cut in an exchange of unequal blocks."""
    sent = [LARGE // 4 + rank for rank in range(4)]
    x, received = torch.ones(sum(sent)), [sent[dist.get_rank()]] * 4
    with ag.deadline(SECONDS):
        fault()
        for _ in range(9):
            ag.all_to_all(x, send_sizes=sent, recv_sizes=received)


@scenario(nothing, expect=(["exact"], ["exact"]), rate="1mbit")
def slow_link(fault):
    """A link of 1 Mbit/s: slow, but alive."""
    rank, world = dist.get_rank(), dist.get_world_size()
    fault()
    with ag.deadline(10), ag.lockstep() as step:
        x = piece(rank)
        y = ag.all_gather(x)
        large = torch.full((1 << 13,), 1.0 + rank)
        assert (ag.all_reduce(large) == 10).all()
        step.backward(loss(y, rank))
    same(x.grad, joined_gradient(rank, world), "the gradient")


@scenario(cut_and_restore, expect=(["exact"], ["exact"]), before_next_call=True)
def link_comes_back(fault):
    """The link is cut for 0.7 s, and comes back."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x = piece(rank)
    with ag.deadline(10):
        fault()
        y = ag.all_gather(x)
        loss(y, rank).backward()
    same(x.grad, joined_gradient(rank, world), "the gradient")


@scenario(remove(1), expect=([LATE, LOST], ["killed"]))
def host_gone(fault):
    """Host 1 is gone, with its processes and its link."""
    cut_in_forward(fault)


@scenario(remove(0), expect=(["killed"], [LOST]))
def store_host_gone(fault):
    """Host 0 is gone, with the store."""
    cut_in_forward(fault)


def run_scenario(name, folder):
    """Run it on this rank, and write how it ended to a file before anything else can happen."""
    rank, scenario = dist.get_rank(), SCENARIOS[name]
    began = time.monotonic()

    def fault():
        # No rank goes on, with its deadline running, before all are here: one may be slow to start.
        nonlocal began
        Path(folder, f"{rank}.ready").touch()
        while len(list(Path(folder).glob("*.ready"))) < dist.get_world_size() or (
            scenario.before_next_call and not Path(folder, "fault").exists()
        ):
            time.sleep(0.01)
        began = time.monotonic()

    ag.all_reduce(torch.ones(1))
    ended = {"error": "exact", "text": ""}
    try:
        scenario.body(fault)
    except Exception as error:  # noqa: BLE001
        ended = {"error": type(error).__name__, "text": str(error)}
    ended["seconds"] = time.monotonic() - began
    Path(folder, f"{rank}.json").write_text(json.dumps(ended))
    dist.destroy_process_group()
