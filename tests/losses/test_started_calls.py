"""Losses beside async calls: backward has one order, wherever each rank waits."""

import pytest
import torch

import allgrad as ag
from allgrad.losses import clip_loss, cross_entropy, multiple_negatives_loss, reference, supcon_loss
from exactness import leaf, random, same

COUNT, WIDTH = 4, 3
IDS = torch.arange(COUNT) % 2
HIDDEN, TARGETS = torch.ones(1, WIDTH, dtype=torch.float64), torch.tensor([1])

LOSSES = {
    "clip": (
        lambda x, y: clip_loss(x, y, 3.0),
        lambda xs, ys, _: reference.clip(xs, ys, 3.0),
    ),
    "multiple negatives": (
        lambda x, y: multiple_negatives_loss(x, y, 3.0),
        lambda xs, ys, _: reference.multiple_negatives(xs, ys, 3.0),
    ),
    "supcon": (
        lambda x, y: supcon_loss(x, y, 3.0, IDS, IDS),
        lambda xs, ys, world: reference.supcon(xs, ys, 3.0, IDS.repeat(world), IDS.repeat(world)),
    ),
    "cross entropy": (
        lambda _x, y: cross_entropy(HIDDEN, y, TARGETS),
        # It counts once, whatever the number of ranks.
        lambda _xs, ys, world: reference.cross_entropy(HIDDEN, ys, TARGETS) / world,
    ),
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", LOSSES)
def test_a_handle_waited_before_a_loss_or_after_it(rank, world, name):
    loss, formula = LOSSES[name]
    wide = [[random((COUNT, WIDTH), 2 * r + k) for k in range(2)] for r in range(world)]
    x, y = map(leaf, wide[rank])
    handle = ag.all_gather(x, sizes="equal", async_op=True)
    early = handle.wait() if rank == 0 else None
    value = loss(x, y)
    joined = handle.wait() if early is None else early
    weights = torch.arange(1.0, joined.numel() + 1, dtype=x.dtype).view(joined.shape)
    (value + (weights * joined).sin().sum()).backward()
    xs, ys = (leaf(torch.cat(each)) for each in zip(*wide, strict=True))
    total = world * (formula(xs, ys, world) + (weights * xs).sin().sum())
    total.backward()
    own = slice(rank * COUNT, (rank + 1) * COUNT)
    same(x.grad, xs.grad[own], "the gradient of x")
    same(y.grad, ys.grad[own], "the gradient of y")
