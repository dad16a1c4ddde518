"""What is saved for backward, and what is freed afterwards."""

import gc
import resource
import time
import weakref
from pathlib import Path

import pytest
import torch

import allgrad as ag
from calls import CALLS, Place
from exactness import leaf, random

NONLINEAR = ("prod", "min", "max", "logsumexp")


def saved_by(run):
    """The tensors that a call saves for backward."""
    saved = []

    def pack(t):
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run()
    return saved


@pytest.mark.one_in(4)
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    "name", [n for n in CALLS if not any(op in n for op in NONLINEAR) and "mean" not in n]
)
def test_linear_collectives_save_nothing(rank, world, name):
    call = CALLS[name]
    shapes = call.shapes(world)
    x = leaf(random(shapes[rank % len(shapes)], rank))
    assert saved_by(lambda: call.run(Place(rank, world), x)) == []


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("op", NONLINEAR)
def test_reductions_save_the_pieces_and_the_result_once(rank, world, op):
    """What torch itself saves for the same reduction over the stacked pieces, and nothing more."""
    x = leaf(random((5, 4), rank))
    stacked = leaf(torch.stack([random((5, 4), r) for r in range(world)]))
    reduce = {
        "prod": lambda t: t.prod(0),
        "min": lambda t: t.amin(0),
        "max": lambda t: t.amax(0),
        "logsumexp": lambda t: t.logsumexp(0),
    }[op]
    mine = saved_by(lambda: ag.all_reduce(x, op))
    alone = saved_by(lambda: reduce(stacked))
    assert sorted(t.numel() for t in mine) == sorted(t.numel() for t in alone)


def step(x, number):
    """A gradient, and in every tenth step a second derivative."""
    y = ag.all_gather(x, sizes="equal").sin()
    if number % 10:
        y.square().sum().backward()
    else:
        y = ag.all_reduce(y, "max")
        (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        g.square().sum().backward()
    x.grad = None


def resident():
    """Resident memory, in KiB."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    lines = status.read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


@pytest.mark.ranks(2, timeout=110)
def test_a_thousand_steps_leave_memory_flat():
    """A leak of one piece in each step would be 125 MiB, in each second derivative 12.5 MiB."""
    x = leaf(random((512, 32), 0))
    for number in range(100):
        step(x, number)
    gc.collect()
    before = resident()
    for number in range(1000):
        step(x, number)
    assert resident() - before < 8 * 1024, f"{before} KiB became {resident()} KiB"


def gone(watched):
    """Gloo's own thread releases the tensors of a call a moment after the call is done."""
    until = time.monotonic() + 3
    while any(ref() is not None for ref in watched) and time.monotonic() < until:
        time.sleep(0.001)
    return [ref() for ref in watched] == [None] * len(watched)


@pytest.mark.one_in(6)
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", CALLS)
def test_no_cycle_keeps_a_tensor_alive(rank, world, name):
    call = CALLS[name]
    shapes = call.shapes(world)
    shape = shapes[rank % len(shapes)]
    call.run(Place(rank, world), leaf(random(shape, rank)))  # fills the caches
    gc.disable()
    try:
        x = leaf(random(shape, rank))
        h = x * 2
        y = call.run(Place(rank, world), h)
        watched = [weakref.ref(t) for t in (x, h, y)]
        if y.requires_grad:
            (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
            g.square().sum().backward()
            watched.append(weakref.ref(g))
            del g
        x.grad = None
        del x, h, y
        assert gone(watched)
    finally:
        gc.enable()
