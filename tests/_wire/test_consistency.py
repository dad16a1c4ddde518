"""Checked mode: from the environment, and with threads that use groups of their own."""

import contextlib
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

import allgrad as ag
from allgrad._core import call_queue
from allgrad._wire import consistency
from allgrad._wire.consistency import CallSpec
from allgrad._wire.groups import find_group
from allgrad.errors import AllgradError
from allgrad.losses import multiple_negatives_loss, reference
from allgrad.testing import run_ranks


def test_the_environment_switches_checks_on():
    program = """if True:
        import os
        import allgrad._wire.consistency as c
        import importlib
        for value in ("1", "0", "True", "False", "off", ""):
            os.environ["ALLGRAD_CHECK"] = value
            print(importlib.reload(c).is_checking())
    """
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.split() == ["True", "False", "True", "False", "False", "False"]


CHECKED_ON_ONE = """if True:
    import contextlib, sys, torch, torch.distributed as dist, allgrad as ag
    rank, file = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=3)
    try:
        with ag.checked() if rank == 1 else contextlib.nullcontext():
            ag.all_reduce(torch.ones(1))
    except ag.errors.AllgradError as error:
        print(f"{type(error).__name__}: {error}")
"""


@pytest.mark.timeout(60)
def test_checks_on_one_rank_from_the_first_call_on(tmp_path):
    """The processes end by themselves, with an error and not with an abort of the backend."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", CHECKED_ON_ONE, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        found = [process.communicate(timeout=50)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0, 0], found
    assert any(text.startswith("CollectiveMismatch") for text in found), found
    assert all("wait for each other in different calls" in text for text in found), found


def both_at_once():
    """Rank 0 starts with one group, rank 1 with the other: each thread waits for the other rank."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    rank, results = dist.get_rank(), {}
    first_is_in = threading.Event()

    def use(number, group):
        if number != rank:
            first_is_in.wait(0.5)  # the other thread is inside its call by then
        else:
            first_is_in.set()
        results[number] = ag.all_reduce(torch.tensor(float(number + 1)), group=group).item()

    with ag.checked(sites=False):
        threads = [threading.Thread(target=use, args=each) for each in enumerate(groups)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert results == {0: 2.0, 1: 4.0}


def test_threads_with_their_own_groups_do_not_wait_for_each_other():
    run_ranks(both_at_once, 2, timeout=40)


def sum_other_names():
    """The same number of tensors under another key on rank 1; then the same nest, compiled there."""
    told = ""
    with ag.checked():
        try:
            ag.all_reduce({"a" if dist.get_rank() else "b": torch.ones(1)})
        except ag.errors.CollectiveMismatch as error:
            told = str(error)
        total = torch.compile(ag.all_reduce, backend="eager", fullgraph=True)
        nest = {"a": torch.ones(2), "b": [torch.ones(())]}
        found = total(nest) if dist.get_rank() else ag.all_reduce(nest)
    return told, found["b"][0].item()


@pytest.mark.timeout(90)
def test_names_in_a_nest_are_compared():
    for told, total in run_ranks(sum_other_names, 2, timeout=60):
        assert "x['a']" in told
        assert "x['b']" in told
        assert total == 2.0


def exchange_other_counts(with_counts):
    """Rank 2 expects three rows of rank 0, which sends two; then all counts fit."""
    rank, mine = dist.get_rank(), torch.arange(4.0) + 10 * dist.get_rank()
    receive = [[1, 1, 1], [1, 1, 1], [2, 2, 2]][rank]
    wrong = [3, 2, 2] if rank == 2 else receive
    before, consistency._WITH_COUNTS = consistency._WITH_COUNTS, with_counts
    told = ""
    try:
        with ag.checked():
            try:
                ag.all_to_all(mine, send_sizes=[1, 1, 2], recv_sizes=wrong)
            except ag.errors.CollectiveMismatch as error:
                told = str(error)
            found = ag.all_to_all(mine, send_sizes=[1, 1, 2], recv_sizes=receive)
            even = ag.all_to_all(mine[:3], send_sizes="equal")
    finally:
        consistency._WITH_COUNTS = before
    return told, found.tolist(), even.tolist()


@pytest.mark.parametrize("with_counts", [64, 0], ids=["in one message", "in messages of their own"])
def test_counts_of_an_exchange_are_compared(with_counts):
    for rank, (told, found, even) in enumerate(run_ranks(exchange_other_counts, 3, with_counts)):
        (marked,) = [line for line in told.splitlines() if "<-" in line]
        assert marked.lstrip().startswith("rank 2:")
        assert marked.endswith("<- expects 3 from rank 0, which sends 2")
        own = [[rank + 10 * source] for source in range(3)]
        blocks = own if rank < 2 else [[2 + 10 * source, 3 + 10 * source] for source in range(3)]
        assert found == [float(value) for block in blocks for value in block]
        assert even == [float(value) for (value,) in own]


def test_messages_of_large_groups_do_not_grow():
    assert CallSpec.words(64) == CallSpec.words(16384) + 128


@pytest.mark.ranks(3)
def test_wrong_sizes_of_one_rank_are_named_on_every_rank(rank):
    """Given sizes are not exchanged; in checked mode no rank waits for the one that raised."""
    x, ones = torch.ones(2 if rank == 1 else 3), [1, 1, 1]
    calls = {
        "all_gather": lambda: ag.all_gather(x, sizes=[3, 3, 3]),
        "shift": lambda: ag.shift(x, sizes=[3, 3, 3]),
        "reduce_scatter": lambda: ag.reduce_scatter(x, sizes=ones),
        "all_to_all": lambda: ag.all_to_all(x, send_sizes=ones, recv_sizes=ones),
    }
    for name, call in calls.items():
        wanted = ag.errors.SizesError if rank == 1 else ag.errors.RankRaised
        with ag.checked(), pytest.raises(wanted, match=name) as caught:
            call()
        assert rank == 1 or "rank 1" in str(caught.value)
    assert ag.all_reduce(torch.ones(1)).item() == 3


@pytest.mark.ranks(3)
def test_any_wrong_argument_of_one_rank_is_named_on_every_rank(rank):
    """What a rank can see by itself, before anything is sent."""
    wrong, x = rank == 1, torch.ones(3)
    calls = {
        "all_gather": lambda: ag.all_gather(x, sizes="equal", grad="avg" if wrong else "sum"),
        "all_reduce": lambda: ag.all_reduce(x, "total" if wrong else "sum"),
        "all_reduce ": lambda: ag.all_reduce("x" if wrong else x),
        "all_to_all": lambda: ag.all_to_all(x, grad="avg" if wrong else "sum"),
        "broadcast": lambda: ag.broadcast(x, 9 if wrong else 0),
        "broadcast ": lambda: ag.broadcast(None if wrong else x),
        "gather": lambda: ag.gather(x, 9 if wrong else 0),
        "permute": lambda: ag.permute(x, [(0, 1), (0, 2)] if wrong else [(0, 1)]),
        "permute ": lambda: ag.permute(x, [0] if wrong else [(0, 1)]),
        "reduce": lambda: ag.reduce(x.bool() if wrong else x),
        "reduce_scatter": lambda: ag.reduce_scatter(x, grad="avg" if wrong else "sum"),
        "scan": lambda: ag.scan(x, "mean" if wrong else "sum", exclusive=True),
        "scatter": lambda: ag.scatter(x, 9 if wrong else 0),
        "shift": lambda: ag.shift(x, "one" if wrong else 1),
    }
    for name, call in calls.items():
        wanted = ag.errors.InputError if wrong else ag.errors.RankRaised
        with ag.checked(), ag.deadline(20), pytest.raises(wanted, match=name.strip()) as caught:
            call()
        assert wrong or "rank 1" in str(caught.value)
    assert ag.all_reduce(torch.ones(1)).item() == 3


def pending_at_the_edge(late, leaving):
    """A call is started on one side of a block's edge, and on one rank it runs on the other side."""
    x, beyond = torch.full((2,), dist.get_rank() + 1.0), threading.Event()
    inside, outside = ag.checked, contextlib.nullcontext
    before, after = (inside, outside) if leaving else (outside, inside)
    with before():
        if dist.get_rank() == late:
            call_queue.start(lambda: beyond.wait(20), find_group("test", None).queue)
        pending = ag.all_reduce(x, grad="none", async_op=True)
        if dist.get_rank() != late:
            time.sleep(0.3)  # it runs before this rank comes to the edge
    with after():
        beyond.set()
        plain = ag.all_reduce(10 * x, grad="none")
        assert pending.wait().tolist() == [6.0, 6.0]
    assert plain.tolist() == [60.0, 60.0]


@pytest.mark.parametrize("leaving", [False, True])
@pytest.mark.parametrize("late", [0, 2])
def test_a_call_pending_at_the_edge_of_a_block(late, leaving):
    run_ranks(pending_at_the_edge, 3, late, leaving, timeout=20)


def refused_behind_a_pending_call():
    """One rank refuses its call while an earlier one has not run yet: the others hear of it in order."""
    rank, beyond = dist.get_rank(), threading.Event()
    with ag.checked():
        if rank == 1:
            call_queue.start(lambda: beyond.wait(20), find_group("test", None).queue)
            threading.Timer(0.3, beyond.set).start()
        pending = ag.all_reduce(torch.ones(2), grad="none", async_op=True)
        with pytest.raises(AllgradError) as caught:
            ag.all_reduce(torch.ones(2), op="sum" if rank != 1 else "nonsense")
        assert pending.wait().tolist() == [3.0, 3.0]
    assert type(caught.value).__name__ == ("ReductionError" if rank == 1 else "RankRaised")


def test_a_refusal_waits_for_the_calls_before_it():
    run_ranks(refused_behind_a_pending_call, 3, timeout=20)


def go_on_after_a_caught_error():
    """One rank raises between two calls, and every rank catches what it gets."""
    rank, x = dist.get_rank(), torch.eye(4, requires_grad=True)
    for _ in range(4):  # so often that the next one is expected
        multiple_negatives_loss(x, x.sin(), 5.0)
    with ag.checked():
        caught = ""
        try:
            with ag.lockstep():
                ag.all_reduce(x)
                1 / (rank != 1)
                multiple_negatives_loss(x, x.sin(), 5.0)
        except (ZeroDivisionError, AllgradError) as error:
            caught = type(error).__name__
        assert caught == ("ZeroDivisionError" if rank == 1 else "RankRaised")
        ag.all_reduce(x).sum().backward()
        assert torch.equal(x.grad, torch.full((4, 4), 3.0))
    whole = torch.cat([x.detach()] * 3)
    want = reference.multiple_negatives(whole, whole.sin(), 5.0).item()
    return multiple_negatives_loss(x, x.sin(), 5.0).item() == pytest.approx(want)


def test_the_group_can_be_used_after_a_caught_error():
    assert all(run_ranks(go_on_after_a_caught_error, 3, timeout=40))
