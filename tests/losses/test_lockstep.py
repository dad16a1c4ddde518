"""Losses in a lockstep block: every rank goes backward through them, with a loss of its own or without."""

import gc
import weakref

import pytest
import torch

import allgrad as ag
from allgrad.losses import clip_loss, info_nce_loss, siglip_loss

LOSSES = {
    "clip": lambda x, y, **how: clip_loss(x, y, 3.0, **how),
    "siglip": lambda x, y, **how: siglip_loss(x, y, 3.0, -1.0, **how),
    "info_nce": lambda x, y, **how: info_nce_loss(x, y, 3.0, **how),
}


def features(rank):
    made = torch.Generator().manual_seed(rank)
    x, y = (torch.randn(rank + 2, 4, generator=made, dtype=torch.float64) for _ in "xy")
    return x.requires_grad_(), y.requires_grad_()


@pytest.mark.parametrize("ring", [None, True])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.ranks(2, 3)
def test_a_rank_without_a_loss_takes_part(rank, world, name, ring):
    loss = LOSSES[name]
    for holder in range(world):
        has_loss = rank == holder
        x, y = features(rank)
        (loss(x, y, ring=ring) * has_loss).backward()
        wanted, (x, y) = (x.grad, y.grad), features(rank)
        with ag.lockstep() as step:
            unused = ag.all_gather(x * 2)
            value = loss(x, y, ring=ring)
            ag.all_reduce(y.sum())
        step.backward([value, unused.sum()] if has_loss else None)
        torch.testing.assert_close(x.grad, wanted[0] + 2, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(y.grad, wanted[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.ranks(1, 2)
def test_a_block_that_never_goes_back_keeps_nothing(rank, world, name):
    x, y = (2 * z for z in features(rank))
    watched = weakref.ref(x)
    with ag.lockstep():
        value = LOSSES[name](x, y)
    del value, x, y
    gc.collect()
    assert watched() is None


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.ranks(2)
def test_a_loss_changed_in_place(rank, world, name):
    """As for gradient accumulation."""
    x, y = features(rank)
    wanted = torch.autograd.grad(LOSSES[name](x, y) / 4, (x, y))
    with ag.lockstep() as step:
        value = LOSSES[name](x, y)
        value /= 4
    step.backward(value)
    torch.testing.assert_close((x.grad, y.grad), wanted)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.ranks(2)
def test_second_derivative_with_a_rank_that_has_no_loss(rank, world, name):
    loss = LOSSES[name]

    def gradients(in_lockstep):
        x, y = features(rank)
        first = rank == 0
        if not in_lockstep:
            (by_x,) = torch.autograd.grad(loss(x, y) * first, x, create_graph=True)
            (by_x.square().sum() * first).backward()
            return x.grad, y.grad
        with ag.lockstep() as step:
            value = loss(x, y)
            step.backward(value if first else None, create_graph=True)
            by_x, x.grad, y.grad = x.grad, None, None
            step.backward(by_x.square().sum() if first else None)
        return x.grad, y.grad

    for got, wanted in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)
