"""Backward runs in one order on every rank, whatever threads made the graph and whatever came before."""

import os
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

import allgrad as ag
from allgrad._autograd import call_order
from allgrad.errors import AllgradError
from allgrad.testing import run_ranks
from exactness import grads, leaf, loss, random, same
from orders import LENGTH, Threads, in_one_process, make_nodes, on_rank

SEEDS = range(200 if os.environ.get("ALLGRAD_ALL") else 24)


@pytest.mark.timeout(600)
@pytest.mark.ranks(2, timeout=580)
def test_threads_and_different_histories(rank, world):
    threads, places = Threads(), ("main", "second")
    threads.run("second", make_nodes, 2000)
    for seed in SEEDS:
        got = on_rank(seed, rank, threads, places)
        for g, want in zip(got, in_one_process(seed, world, places)[rank], strict=True):
            same(g, want, f"the gradient of seed {seed}")


def differ_on_a_new_thread():
    """A computation on a new thread, whose numbers autograd begins at 0, between two calls."""
    rank = dist.get_rank()
    if rank:
        make_nodes(500)
    x = leaf(random((LENGTH,), rank))
    early = ag.all_reduce(x.sin())
    late = ag.all_reduce(x.cos())
    behind = Threads().run("second" if rank else "main", lambda: late * late)
    try:
        (early.sum() + behind.sum()).backward()
    except AllgradError as error:
        dist.destroy_process_group()
        return f"{type(error).__name__}: {error}"
    return x.grad


def test_what_cannot_be_ordered_raises_on_every_rank():
    """Or it is exact, where a test before this one has started gates on all of these processes."""
    found = run_ranks(differ_on_a_new_thread, 3, timeout=60)
    if not any(isinstance(one, str) for one in found):
        xs = [leaf(random((LENGTH,), rank)) for rank in range(3)]
        early, late = sum(x.sin() for x in xs), sum(x.cos() for x in xs)
        wanted = torch.autograd.grad(3 * (early.sum() + (late * late).sum()), xs)
        for got, want in zip(found, wanted, strict=True):
            same(got, want, "the gradient")
        return
    assert all(isinstance(one, str) for one in found), found
    # With gates on some of them it is seen from the other call.
    seen = r"backward came to all_reduce (after all_reduce, which was made before|before all_reduce, which was made after) it"
    for text in found:
        assert text.startswith(("RankRaised", "CollectiveMismatch"))
        assert re.search(seen, text), text
        assert "lockstep" in text


@pytest.mark.ranks(2)
def test_each_thread_with_a_group_of_its_own(rank, world):
    """The calls of two groups wait for each other too, where ranks run them in two orders."""
    first, second = (dist.new_group([0, 1]) for _ in range(2))
    before, call_order.STATE = call_order.STATE, call_order._State()
    try:
        threads = Threads()
        threads.run("second", make_nodes, 3000)
        make_nodes(6000 if rank else 0)
        x = leaf(random((LENGTH,), rank))
        with ag.deadline(10):
            one = ag.all_reduce(x.sin(), group=first)
            other = threads.run("second", lambda: ag.all_reduce(x.cos(), group=second))
            (got,) = torch.autograd.grad(one.square().sum() + other.square().sum(), x)
    finally:
        call_order.STATE = before
    xs = [leaf(random((LENGTH,), r)) for r in range(world)]
    parts = sum(y.sin() for y in xs), sum(y.cos() for y in xs)
    wanted = torch.autograd.grad(world * sum(y.square().sum() for y in parts), xs)
    same(got, wanted[rank], "the gradient")


@pytest.mark.ranks(2)
def test_gated_results_are_plain_tensors(rank, world):
    """With gates: changing results in place, nests, async calls, graphs that are kept."""
    threads = Threads()
    x = leaf(random((LENGTH,), rank))
    threads.run("second", ag.all_reduce, leaf(random((LENGTH,), rank)))
    ag.all_reduce(x)
    assert call_order.STATE.gated
    nest = ag.all_gather({"a": x * 2, "b": [x.sin()]})
    nest["a"].mul_(2)
    nest["b"][0] += 1
    handle = ag.all_reduce(x.cos(), async_op=True)
    shared = ag.share(x)
    total = loss(nest["a"], rank) + loss(nest["b"][0], rank) + loss(handle.wait(), rank)
    total = total + (shared * (rank + 1)).sum() + loss(ag.all_reduce(x, "max"), rank)
    first = torch.autograd.grad(total, x, retain_graph=True)[0]
    again = torch.autograd.grad(total, x)[0]
    same(again, first, "a second pass over the graph")
    leaves = [leaf(random((LENGTH,), r)) for r in range(world)]
    everyone = 0
    for r in range(world):
        everyone = everyone + loss(torch.cat([4 * t for t in leaves]), r)
        everyone = everyone + loss(torch.cat([t.sin() + 1 for t in leaves]), r)
        everyone = everyone + loss(sum(t.cos() for t in leaves), r) + (leaves[rank] * (r + 1)).sum()
        everyone = everyone + loss(torch.stack(leaves).amax(0), r)
    same(first, grads(everyone, leaves)[rank], "the gradient")


def in_threads_that_follow_one_another():
    """Each thread ends before the next begins, which may get its number."""
    rank, world = dist.get_rank(), dist.get_world_size()
    make_nodes(100)
    x, w = (leaf(random((LENGTH,), 2 * rank + k)) for k in range(2))

    def gathered(t, nodes):
        def run():
            z = t
            for _ in range(nodes):
                z = z * 1
            return ag.all_gather(z, sizes="equal")

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(run).result()

    a, b = gathered(x, 5 if rank == 0 else 0), gathered(w, 0 if rank == 0 else 5)
    weights = torch.arange(1.0, LENGTH * world + 1, dtype=x.dtype)
    try:
        ((weights * a).sum() + (100 * weights * b).sum()).backward()
    except AllgradError as error:
        dist.destroy_process_group()
        return type(error).__name__
    own = world * weights[rank * LENGTH : (rank + 1) * LENGTH]
    same(x.grad, own, "the gradient of the first")
    same(w.grad, 100 * own, "the gradient of the second")
    return "exact"


def test_threads_one_after_the_other_are_several():
    """New threads have no numbers below those of computations: exact, or an error on every rank."""
    found = run_ranks(in_threads_that_follow_one_another, 2, timeout=60)
    assert found in (["exact"] * 2, ["CollectiveMismatch"] * 2)


@pytest.mark.ranks(2)
def test_a_graph_that_is_kept_leaves_calls_their_numbers(rank, world):
    """Numbers of calls stay below those of computations, however many calls were made since."""
    x, threads = leaf(random((LENGTH,), rank)), Threads()
    threads.run("second", lambda: ag.all_reduce(x))  # from now on calls have numbers
    assert call_order.STATE.gated
    kept = ag.all_reduce(x)
    for _ in range(call_order._RESERVED):
        last = ag.all_reduce(x)
        newest = call_order.STATE.nodes[-1]()
        assert call_order.sequence_number_of(newest) < call_order._RESERVED
    (kept.sin().sum() + last.cos().sum()).backward()
    total = sum(random((LENGTH,), r) for r in range(world))
    same(x.grad, world * (total.cos() - total.sin()), "the gradient")
