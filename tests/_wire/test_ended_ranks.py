"""A rank that ended with an error in one group ends waits for it in others, unless it goes on."""

import contextlib
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import allgrad as ag
from allgrad._wire import ended_ranks, watchdog
from allgrad._wire.calls import Call
from allgrad._wire.groups import Group
from allgrad.errors import AllgradError
from allgrad.testing import run_ranks


@contextlib.contextmanager
def looking_every(seconds, grace):
    usual = watchdog._LOOK_EVERY, ended_ranks._GRACE
    watchdog._LOOK_EVERY, ended_ranks._GRACE = seconds, grace
    ag.all_reduce(torch.ones(1))
    time.sleep(1)  # the last look of the old kind
    try:
        yield
    finally:
        watchdog._LOOK_EVERY, ended_ranks._GRACE = usual


def ended(call):
    try:
        return call().tolist()
    except AllgradError as error:
        return f"{type(error).__name__}: {error}"


def is_cut_off():
    """Rank 0 gives up, rank 1 is cut off by that, and rank 2 waits for rank 1 in another group."""
    rank, x = dist.get_rank(), torch.ones(3)
    pair, side = dist.new_group([0, 1]), dist.new_group([1, 2])
    with looking_every(0.05, grace=0.3):
        if rank == 2:
            found = ended(lambda: ag.all_reduce(x, group=side))
        else:
            time.sleep(0.5 * rank)
            with ag.deadline(0.2 if rank == 0 else None):
                found = ended(lambda: ag.all_reduce(x, group=pair))
        dist.barrier()  # no rank closes its connections before
        dist.destroy_process_group()
    return found


@pytest.mark.timeout(60)
def test_a_rank_that_was_cut_off_keeps_nobody_waiting():
    found = run_ranks(is_cut_off, 3, timeout=30)
    assert found[0].startswith("RankLate: "), found
    assert found[1].startswith(("RankLate: ", "RankLost: ")), found
    assert "RankRaised: all_reduce: rank 1 of group" in found[2], found
    assert "only waited for rank 1" in found[2], found


def goes_on():
    """Ranks 0 and 1 catch an error of the pair; rank 1 goes on with rank 2, and is late."""
    rank = dist.get_rank()
    pair, side, late = (dist.new_group(ranks) for ranks in ([0, 1], [1, 2], [1, 2]))
    found = []
    # The last one to look finds the difference. Rank 2 hears of it in both ways: lockstep listens.
    with looking_every(0.3 if rank == 1 else 0.05, grace=2):
        if rank < 2:
            found.append(ended(lambda: ag.all_reduce(torch.ones(3 + rank), group=pair)))
        if rank > 0:
            found.append(ended(lambda: ag.all_reduce(torch.ones(1), group=side)))
            time.sleep(3 if rank == 1 else 0)
            with ag.lockstep() if rank == 2 else contextlib.nullcontext():
                found.append(ended(lambda: ag.all_reduce(torch.ones(1), group=late)))
        dist.barrier()
        dist.destroy_process_group()
    return found


@pytest.mark.timeout(60)
def test_a_rank_that_caught_its_error_is_waited_for():
    found = run_ranks(goes_on, 3, timeout=30)
    assert all("different tensors" in found[rank][0] for rank in (0, 1)), found
    assert [found[1][1:], found[2]] == [[[2.0], [2.0]]] * 2


class WithdrawnMeanwhile:
    """A store in which a rank clears what it wrote after it was asked whether there is something."""

    def __init__(self):
        self.store, self.withdrawn = dist.HashStore(), False
        self.store.set_timeout(timedelta(seconds=0.2))

    def check(self, keys):
        there = self.store.check(keys)
        if not self.withdrawn:
            self.withdrawn = True
            ended_ranks.withdraw()
        return there

    def __getattr__(self, name):
        return getattr(self.store, name)


def test_what_is_withdrawn_between_two_questions_is_not_waited_for(monkeypatch):
    store = WithdrawnMeanwhile()
    monkeypatch.setattr(ended_ranks, "world_store", lambda: store)
    monkeypatch.setattr(Group, "members", [0])
    ended_ranks.publish(AllgradError("ended"))
    assert store.store.check([ended_ranks.ended_key(0)])
    assert ended_ranks.find(Call(Group(None), 0, 1, "all_reduce"), [0]) is None
    assert store.withdrawn
