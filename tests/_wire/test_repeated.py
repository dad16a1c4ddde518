"""Exchanges that repeat go by the backend, once every rank has shown that it makes the same ones."""

import signal
import time

import pytest
import torch

import allgrad as ag
from allgrad._wire import algorithms
from traffic import Traffic

BACKEND, PAIRWISE = {"all_to_all_single": 1}, {"isend": 2, "irecv": 2}


@pytest.mark.ranks(3)
def test_the_known_successor_goes_by_the_backend(rank):
    lengths = (6, 6, 6, 9, 6, 9, 6, 6, 9)  # 9 follows 6 at last, until 6 follows it again
    by_backend = (0, 0, 1, 0, 0, 1, 1, 0, 0)
    with algorithms.using(all_to_all="repeated"):
        for n, known in zip(lengths, by_backend, strict=True):
            x = torch.arange(n) + 10 * rank
            with Traffic() as traffic:
                y = ag.all_to_all(x, send_sizes="equal")
            want = torch.cat([(torch.arange(n) + 10 * r).chunk(3)[rank] for r in range(3)])
            assert torch.equal(y, want)
            assert dict(traffic.calls) == (BACKEND if known else PAIRWISE), (n, known)


@pytest.mark.ranks(3)
def test_backward_repeats_forward(rank):
    x = torch.full((6,), rank + 1.0, requires_grad=True)
    with algorithms.using(all_to_all="repeated"):
        for _ in range(2):  # forward, backward
            with Traffic() as traffic:
                y = ag.all_to_all(x, send_sizes="equal")
                (g,) = torch.autograd.grad((y * y).sum(), x)
            assert torch.equal(g, 2 * x)
    assert traffic.calls["all_to_all_single"] == 2


def interrupt(*_):
    raise KeyboardInterrupt


@pytest.mark.ranks(2)
def test_interrupted_rank_knows_the_same_successors(rank):
    """Ctrl-C while it waits for a rank that is late: the program catches it, and goes on."""
    x = torch.arange(4.0) + 10 * rank
    with algorithms.using(all_to_all="repeated"), ag.deadline(20):
        ag.all_to_all(x, send_sizes="equal")
        if rank == 0:
            before = signal.signal(signal.SIGALRM, interrupt)
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(KeyboardInterrupt):
                ag.all_to_all(x, send_sizes="equal")
            signal.signal(signal.SIGALRM, before)
        else:
            time.sleep(1)
            ag.all_to_all(x, send_sizes="equal")
        for _ in range(2):
            y = ag.all_to_all(x, send_sizes="equal")
            assert y.tolist() == [2.0 * rank, 2 * rank + 1, 10 + 2 * rank, 11 + 2 * rank]
