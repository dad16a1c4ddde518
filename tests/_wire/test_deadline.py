"""A deadline ends with its block; blocks may be nested, and those of several threads may overlap."""

import threading
import time
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

import allgrad as ag
from allgrad._core import call_queue
from allgrad._core.torch_internals import backend_timeout
from allgrad._wire import deadline
from allgrad._wire.calls import resolve
from allgrad._wire.groups import find_group
from allgrad.errors import InputError, RankLate
from allgrad.testing import run_ranks


@pytest.mark.ranks(2)
def test_deadline_ends_with_its_block(rank):
    """Other users of the group, DDP for one, wait as long as they did before."""
    own = backend_timeout(dist.group.WORLD)
    assert own > timedelta(seconds=100)
    with ag.deadline(50):
        ag.all_reduce(torch.ones(1))
        assert backend_timeout(dist.group.WORLD) == timedelta(seconds=50)
        with ag.deadline(20):
            ag.all_reduce(torch.ones(1))
            assert backend_timeout(dist.group.WORLD) == timedelta(seconds=20)
        assert backend_timeout(dist.group.WORLD) == timedelta(seconds=50)
        with ag.deadline(None):
            ag.all_reduce(torch.ones(1))
            assert backend_timeout(dist.group.WORLD) == own
    assert backend_timeout(dist.group.WORLD) == own


def leave_while_pending():
    """A call before it holds the pending one up until the block has ended."""
    group = dist.new_group()
    own, held_up, queue = backend_timeout(group), threading.Event(), find_group("", group).queue
    call_queue.start(lambda: held_up.wait(20), queue)
    with ag.deadline(7):
        pending = ag.all_reduce(torch.ones(2), async_op=True, group=group)
        meanwhile = call_queue.start(lambda: backend_timeout(group).total_seconds(), queue)
    held_up.set()
    result = pending.wait().tolist()
    call_queue.start(lambda: None, queue).result(20)
    return result, meanwhile.result(20), backend_timeout(group) == own


@pytest.mark.timeout(60)
def test_timeouts_last_as_long_as_the_last_pending_call():
    found = run_ranks(leave_while_pending, 3, timeout=40)
    assert found == [([3.0, 3.0], 7.0, True)] * 3


def leave_as_it_begins():
    """The queue's thread comes to the call at about the time when the block ends."""
    own, short = backend_timeout(dist.group.WORLD), 0
    for turn in range(500):
        with ag.deadline(7):
            pending = ag.all_reduce(torch.ones(2), async_op=True)
            time.sleep(turn % 10 * 1e-5)
        assert pending.wait().tolist() == [3.0, 3.0]
        call_queue.start(lambda: None, find_group("", None).queue).result(20)
        short += backend_timeout(dist.group.WORLD) != own
    return short


@pytest.mark.timeout(60)
def test_a_deadline_may_end_while_a_call_begins():
    assert run_ranks(leave_as_it_begins, 3, timeout=40) == [0] * 3


def leave_before_it_begins():
    """Rank 1 does not come to the second call, which began after the block it was started in."""
    group = dist.new_group()
    ag.all_reduce(torch.ones(2), group=group)
    if dist.get_rank() == 1:
        time.sleep(1)
    first = ag.all_reduce(torch.ones(2), group=group, async_op=True)
    if dist.get_rank() == 1:
        first.wait()
        time.sleep(9)
        return "slept"
    with ag.deadline(1):
        second = ag.all_reduce(torch.ones(2), group=group, async_op=True)
    began = time.monotonic()
    with pytest.raises(RankLate, match="rank 1 is late: not here within 1 s"):
        second.wait()
    return time.monotonic() - began < 8


@pytest.mark.timeout(60)
def test_a_call_has_the_deadline_of_where_it_was_started():
    assert run_ranks(leave_before_it_begins, 3, timeout=40) == [True, "slept", True]


class _TwoThreads:
    """Block A is opened first and ends first; block B is opened inside of it, by another thread."""

    def __init__(self, block, in_a, in_b):
        self.block, self.in_a, self.in_b = block, in_a, in_b
        self.a_is_open, self.b_is_open = threading.Event(), threading.Event()
        self.raised = []
        self.a, self.b = (threading.Thread(target=run) for run in (self._run_a, self._run_b))
        self.a.start()
        self.b.start()
        self.b.join(25)

    def _run_a(self):
        with self.block("a"):
            self.a_is_open.set()
            self.b_is_open.wait(20)
            self.in_a()

    def _run_b(self):
        self.a_is_open.wait(20)
        try:
            with self.block("b"):
                self.b_is_open.set()
                self.a.join(20)
                self.in_b()
        except Exception as error:  # noqa: BLE001 - told by the test
            self.raised.append(f"{type(error).__name__}: {error}")


def overlap_deadlines():
    groups = {"a": dist.new_group(), "b": dist.new_group(), "after": dist.new_group()}
    own = {name: backend_timeout(group) for name, group in groups.items()}
    seconds, inside = {"a": 50, "b": 30}, {}

    def call(name):
        ag.all_reduce(torch.ones(1), group=groups[name])
        inside[name] = backend_timeout(groups[name]).total_seconds()

    threads = _TwoThreads(
        lambda name: ag.deadline(seconds[name]), lambda: call("a"), lambda: call("b")
    )
    call("after")
    restored = all(backend_timeout(group) == own[name] for name, group in groups.items())
    return inside["a"], inside["b"], restored, threads.raised


@pytest.mark.timeout(60)
def test_overlapping_deadlines_hold_in_their_own_blocks():
    assert run_ranks(overlap_deadlines, 3, timeout=40) == [(50.0, 30.0, True, [])] * 3


def raise_after_another_block():
    group, x = dist.new_group(), torch.ones(2, requires_grad=True)

    def in_b():
        if dist.get_rank() == 1:
            raise ZeroDivisionError("in block B")
        ag.all_reduce(x, group=group)

    return _TwoThreads(lambda _: ag.lockstep(), lambda: None, in_b).raised


@pytest.mark.timeout(60)
def test_listening_goes_on_when_another_threads_block_ends():
    first, second, third = run_ranks(raise_after_another_block, 3, timeout=40)
    assert second == ["ZeroDivisionError: in block B"]
    assert all(["RankRaised" in text for text in found] == [True] for found in (first, third))


class EndsEarly:
    """A call of the backend that completes between the end of a wait for it and the look at it."""

    def __init__(self, work):
        self.work, self.is_completed = work, work.is_completed

    def wait(self, timeout=None):
        self.work.wait()
        if timeout is not None:
            raise RuntimeError("Operation timed out!")


@pytest.mark.ranks(2)
def test_call_that_completes_as_a_wait_ends_is_no_failure(rank):
    total = torch.tensor([rank + 1.0])
    work = dist.all_reduce(total, async_op=True)
    with ag.deadline(20):
        deadline.wait(resolve("all_reduce", None), EndsEarly(work))
    assert total.item() == 3


@pytest.mark.parametrize("given", ["", "30", "abc"])
def test_the_environment_gives_a_deadline_and_an_empty_text_none(monkeypatch, given):
    monkeypatch.setenv("ALLGRAD_DEADLINE", given)
    if given == "abc":
        with pytest.raises(InputError, match="ALLGRAD_DEADLINE='abc' is not a time"):
            deadline._State()
    else:
        assert deadline._State().no_deadline == (given == "")


@pytest.mark.parametrize("given", [-1, 0, float("nan"), float("inf"), "3", b"3", True, [3]])
def test_what_is_no_time_is_refused(given):
    with (
        pytest.raises(InputError, match=r"^deadline=.* is not a time\.\nGive seconds, more than 0"),
        ag.deadline(given),
    ):
        pass


@pytest.mark.parametrize("given", [3, 0.5, np.float32(2), np.int64(2), torch.tensor(2)])
def test_numbers_of_any_kind_are_times(given):
    with ag.deadline(given):
        assert deadline.seconds_allowed() == float(given)


def wait_in_a_second_world(path):
    rank, world = dist.get_rank(), dist.get_world_size()
    with ag.checked():
        ag.all_reduce(torch.ones(2))
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    if rank == 1:
        time.sleep(6)
        return "slept"
    with ag.deadline(1), pytest.raises(RankLate) as late:
        ag.all_reduce(torch.ones(2))
    return next(row for row in str(late.value).split("\n") if "rank 1:" in row)


@pytest.mark.timeout(60)
def test_what_ranks_agreed_on_is_forgotten_with_their_world(tmp_path):
    rows = run_ranks(wait_in_a_second_world, 3, str(tmp_path / "store"), timeout=40)
    unused = "  rank 1: has not used this group yet   <- not here"
    assert [" ".join(row.split()) for row in rows] == [
        " ".join(row.split()) for row in (unused, "slept", unused)
    ]
