"""What the recordings of these tests are made of: a slow rank, a mismatch, a hang, the demo."""

import contextlib
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

import allgrad as ag
from allgrad.cli.demo.training import TrainingConfig, train_on_ranks
from allgrad.report.load import load

SLOW, STEPS = 2, 12


def train(path, steps=STEPS):
    """Rank 2 takes 15 ms longer in every step, and has the largest piece."""
    rank = dist.get_rank()
    ag.all_reduce(torch.ones(1))  # connections are made in the first call
    with ag.recorded(path):
        for _ in range(steps):
            x = torch.ones(1000 * (1 + 3 * (rank == SLOW)), requires_grad=True)
            joined = ag.all_gather(x, sizes=(1000, 1000, 4000))
            handle = ag.all_reduce(x.sum(), async_op=True)
            if rank == SLOW:
                time.sleep(0.015)
            (joined.sum() + handle.wait()).backward()


def disagree(path):
    """Rank 1 reduces what the others gather."""
    with ag.recorded(path), ag.checked():
        ag.all_reduce(torch.ones(2))
        try:
            if dist.get_rank() == 1:
                ag.all_reduce(torch.ones(3))
            else:
                ag.all_gather(torch.ones(3), sizes="equal")
        except ag.errors.CollectiveMismatch:
            return True
    return False


def hang(path):
    """Rank 1 does not come to the last call, and kills all when the others wait in it."""
    pids = ag.all_gather(torch.tensor([os.getpid()]), sizes="equal").tolist()
    with ag.recorded(path):
        for _ in range(3):
            ag.all_reduce(torch.ones(2))
        if dist.get_rank() != 1:
            ag.all_gather(torch.ones(3), sizes="equal")
        while [len(rank.events) for rank in load(Path(path)).ranks] != [4, 3, 4]:
            time.sleep(0.05)
        kill_all(pids)


def leave(path, *said):
    """Rank 1 leaves by an error, which says something or nothing; the others wait for it in the first call of another group."""
    group = dist.new_group([0, 1, 2])
    ag.all_reduce(torch.ones(2))
    with contextlib.suppress(ValueError), ag.recorded(path), ag.deadline(0.5):
        ag.all_reduce(torch.ones(2))
        if dist.get_rank() == 1:
            raise ValueError(*said)
        ag.all_reduce(torch.ones(3), group=group)


def demo(path, steps=STEPS):
    """The training of ``allgrad demo``: unequal batches, a loss over all of them."""
    with ag.recorded(path):
        train_on_ranks(TrainingConfig("clip", steps, 3, "cpu"), lambda *_: None)


def kill_all(pids):
    """Stop all first: no process sees another one go."""
    others = [pid for pid in pids if pid != os.getpid()]
    for sign in (signal.SIGSTOP, signal.SIGKILL):
        for pid in others:
            os.kill(pid, sign)
    os.kill(os.getpid(), signal.SIGKILL)
