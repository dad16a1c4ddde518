"""Activation checkpointing where ranks do other things behind the last call of a region.

A checkpoint computes its region again once backward meets a tensor that the region saved. Every rank must do so
before it goes backward through the last call, whatever it computed behind it.
"""

import contextlib

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import allgrad as ag
from allgrad import share
from allgrad.losses import clip_loss, cross_entropy, info_nce_loss, supcon_loss
from allgrad.nn import combine, dispatch
from calls import CALLS, Place
from exactness import leaf, random, same

TAILS = {
    "last rank goes on": lambda y, rank, world: y.exp() if rank == world - 1 else y,
    "others go on": lambda y, rank, world: y.exp() if rank < world - 1 else y,
    "only a metric": lambda y, rank, _: (y.square().mean(), y if rank else y.tanh())[1],
}


EARLY = pytest.mark.parametrize("early", [True, False])


def region(block, x, early):
    """``block(x)`` in a checkpoint, or without one where ``early`` is None."""
    if early is None:
        return block(x)
    with set_checkpoint_early_stop(early):
        return checkpoint(block, x, use_reentrant=False)


def derived(block, x, early, lockstep=False):
    x = leaf(x.detach())
    with ag.deadline(30), ag.lockstep() if lockstep else contextlib.nullcontext() as step:
        y = region(block, x, early).sum()
        loss = y * (y + 1)
    step.backward(loss) if lockstep else loss.backward()
    return x.grad


DIFFERENTIABLE = [name for name, call in CALLS.items() if call.kind != "none"]


@pytest.mark.one_in(6)
@pytest.mark.ranks(2, 3)
@EARLY
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_every_collective(rank, world, name, tail, early):
    call = CALLS[name]
    held_by = 0 if call.kind == "alike" else rank
    x = random(call.shapes(world)[held_by], held_by)

    def block(x):
        return TAILS[tail](call.run(Place(rank, world), x.sin()), rank, world)

    same(derived(block, x, early), derived(block, x, None), f"{name}: the gradient")


@EARLY
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("name", ["all_reduce sum", "broadcast", "shift"])
def test_in_lockstep(rank, world, name, tail, early):
    """A whole region, whose recomputation is outside of the block."""
    runs = {
        "all_reduce sum": ag.all_reduce,
        "broadcast": lambda x: ag.broadcast(x, 0),
        "shift": lambda x: ag.shift(x, wrap=False),
    }
    x = random((2, 3), rank)

    def block(x):
        return TAILS[tail](runs[name](x.sin()), rank, world)

    want = derived(block, x, None, lockstep=True)
    same(derived(block, x, early, lockstep=True), want, "the gradient")
    same(derived(block, x, early), want, "the gradient without lockstep")


@EARLY
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("waits_inside", [True, False])
def test_started_calls(rank, world, tail, waits_inside, early):
    x = random((2, 3), rank)

    def run(x, early):
        handles = []

        def block(x):
            handle = ag.all_reduce(x.sin(), async_op=True)
            beside = x.cos() if rank else x  # another number of saved tensors on each rank
            if waits_inside:
                return TAILS[tail](handle.wait(), rank, world) + beside
            handles.append(handle)
            return beside

        x = leaf(x.detach())
        y = region(block, x, early)
        if not waits_inside:
            y = y + TAILS[tail](handles[0].wait(), rank, world)
        (y.sum() * (y.sum() + 1)).backward()
        return x.grad

    with ag.deadline(30):
        want = run(x, None)
        same(run(x, early), want, "the gradient")
        same(run(x, early), want, "the gradient once more")


def inside(x, run, how):
    """A call with something around it that hides what it saves from the checkpoint."""
    if how == "checkpoint":
        return checkpoint(run, x, use_reentrant=False)
    if how == "two checkpoints":
        return checkpoint(lambda x: inside(x, run, "checkpoint").sin(), x, use_reentrant=False)
    if how == "hooks":
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.abs().max() * 0 + x, lambda x: x):
            return run(x)
    if how == "save_on_cpu":
        with torch.autograd.graph.save_on_cpu():
            return run(x)
    if how == "vmap":
        return torch.vmap(run)(torch.stack([x, x.cos()])).sum(0)
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(run(forward_ad.make_dual(x, x.cos())))[1]


HIDDEN = ("checkpoint", "two checkpoints", "hooks", "save_on_cpu", "vmap", "dual numbers")


@EARLY
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("how", HIDDEN)
def test_calls_inside_of_something_else(rank, world, how, tail, early):
    x = random((2, 3), rank)

    def block(x):
        return TAILS[tail](inside(x, lambda x: ag.all_reduce(x.sin()), how), rank, world)

    same(derived(block, x, early), derived(block, x, None), "the gradient")


LOSSES = {
    "clip": lambda x: clip_loss(x, x.cos(), 2.0),
    "info_nce": lambda x: info_nce_loss(x, x.cos(), 2.0),
    "supcon": lambda x: supcon_loss(x, x.cos(), 2.0, torch.arange(2), torch.arange(2)),
    "cross_entropy": lambda x: cross_entropy(share(x.sum(0)[None]), x, torch.tensor([1])),
}


@EARLY
@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", ["checkpoint", "save_on_cpu"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_inside_of_something_else(rank, world, name, how, early):
    x = random((2, 3), rank)

    def block(x):
        return TAILS["last rank goes on"](inside(x, LOSSES[name], how), rank, world)

    same(derived(block, x, early), derived(block, x, None), "the gradient")


@EARLY
@pytest.mark.ranks(2)
@pytest.mark.parametrize("create_graph", [True, False])
def test_backward_inside_of_a_block(rank, world, create_graph, early):
    """What the checkpoint calls again there is no part of the lockstep block."""

    def run(x, early):
        def block(x):
            return TAILS["last rank goes on"](ag.all_reduce(x.sin()), rank, world)

        x = leaf(x.detach())
        with ag.deadline(30), ag.lockstep() as step:
            y = region(block, x, early)
            (g,) = torch.autograd.grad(y.sum(), x, retain_graph=True, create_graph=create_graph)
            step.backward(ag.all_reduce(y).sum() + g.detach().sum())
        return torch.cat([x.grad, g.detach()])

    x = random((2, 3), rank)
    same(run(x, early), run(x, None), "the gradients")


@EARLY
@pytest.mark.ranks(2, 3)
def test_experts_without_tokens(rank, world, early):
    """All tokens go to rank 0: the others have nothing to compute, and nothing to save."""
    x = random((rank + 2, 3), rank)
    weight = random((3, 3), 7)

    def block(x):
        routed = dispatch(x.tanh(), torch.zeros(len(x), dtype=torch.long), experts=world)
        tokens = routed.tokens
        return combine((tokens @ weight).tanh() if len(tokens) else tokens, routed)

    same(derived(block, x, early), derived(block, x, None), "the gradient")


@pytest.mark.ranks(2)
def test_backward_twice_and_second_derivatives(rank):
    x = leaf(random((2, 3), rank))

    def block(x):
        y = ag.all_reduce(x.sin())
        if rank:
            y.square().mean()
        return y.exp()

    found = []
    for early in (None, True, False):
        y = region(block, x, early).sum()
        first = [torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(2)]
        (again,) = torch.autograd.grad(y, x, create_graph=True)
        (second,) = torch.autograd.grad(again.square().sum(), x)
        found.append([*first, again.detach(), second])
    for got in found[1:]:
        for g, want in zip(got, found[0], strict=True):
            same(g, want, "a derivative")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("hooks", [contextlib.nullcontext, torch.autograd.graph.save_on_cpu])
def test_a_call_goes_backward_twice_without_its_graph_kept(rank, world, hooks):
    """As linear functions of torch do: it saves nothing outside of a checkpoint."""
    x = leaf(random((2, 3), rank))
    with hooks():
        y = ag.all_reduce(x).sum()
    y.backward()
    (2 * y).backward()
    assert torch.equal(x.grad, torch.full_like(x, 3.0 * world))
