"""What a collective keeps: nothing if it is linear, only what it needs if not, nothing when done."""

import gc
import weakref
from pathlib import Path

import pytest
import torch

import allgrad as ag
from exactness import leaf, random

LINEAR = {
    "all_reduce": ag.all_reduce,
    "all_reduce mean": lambda x: ag.all_reduce(x, "mean"),
    "all_gather": ag.all_gather,
    "all_gather same": lambda x: ag.all_gather(x, grad="same"),
    "reduce_scatter": ag.reduce_scatter,
    "all_to_all": ag.all_to_all,
    "broadcast": ag.broadcast,
    "reduce": ag.reduce,
    "gather": ag.gather,
    "shift": ag.shift,
    "scan": ag.scan,
    "share": ag.share,
    "split": ag.split,
}


def saved(call, x):
    """How many bytes the call keeps for backward."""
    kept = []

    def keep(t):
        kept.append(t.nbytes)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        y = call(x)
    return sum(kept), y


@pytest.mark.ranks(1, 2)
def test_linear_collectives_keep_nothing(rank):
    for name, call in LINEAR.items():
        assert saved(call, leaf(random((4, 2), rank)))[0] == 0, name


@pytest.mark.ranks(2)
@pytest.mark.parametrize("op", ["max", "min", "prod", "logsumexp"])
def test_other_reductions_keep_the_pieces_and_the_result(rank, world, op):
    """What torch's own reduction of the stacked pieces keeps, and no more."""
    x = leaf(random((64, 64), rank))
    bytes_kept, y = saved(lambda x: ag.all_reduce(x, op), x)
    stacked = torch.stack([random((64, 64), r) for r in range(world)]).requires_grad_()
    model = {"max": torch.amax, "min": torch.amin, "prod": torch.prod, "logsumexp": torch.logsumexp}
    torchs_own, _ = saved(lambda t: model[op](t, 0), stacked)
    assert bytes_kept == torchs_own
    y.sum().backward()


@pytest.mark.ranks(2)
def test_a_large_reduction_keeps_its_share_of_the_elements(rank, world):
    x = leaf(random((200_000,), rank))
    kept, _ = saved(lambda x: ag.all_reduce(x, "max"), x)
    assert kept <= x.nbytes * (1 + 1 / world) + 64


def resident():
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096


@pytest.mark.ranks(2, timeout=110)
def test_memory_stays_flat_over_two_thousand_steps(rank):
    x = leaf(random((rank + 1, 64), rank))

    def steps(count):
        for _ in range(count):
            y = ag.all_gather(x)
            (y.sum() + ag.all_reduce(x[:1], "max").sum()).backward()
            x.grad = None

    steps(300)
    gc.collect()
    before = resident()
    steps(1700)
    gc.collect()
    assert resident() - before < 4 * 2**20


@pytest.mark.ranks(1, 2)
def test_no_cycle_keeps_a_tensor_alive(rank):
    calls = {
        **LINEAR,
        "max": lambda x: ag.all_reduce(x, "max"),
        "scan max": lambda x: ag.scan(x, "max"),
    }
    gc.collect()
    gc.disable()
    try:
        for name, call in calls.items():
            x = leaf(random((4, 2), rank))
            hidden = x * 2
            y = call(hidden)
            kept = [weakref.ref(t) for t in (hidden, y)]
            y.sum().backward()
            del hidden, y
            assert [ref() for ref in kept] == [None, None], name
    finally:
        gc.enable()
