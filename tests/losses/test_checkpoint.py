"""Losses in regions whose activations are computed again in backward."""

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import allgrad as ag
from allgrad.errors import ModeError
from allgrad.losses import (
    clip_loss,
    info_nce_loss,
    maxsim_loss,
    multiple_negatives_loss,
    reference,
    siglip_loss,
    sigmoid_supcon_loss,
    supcon_loss,
)
from allgrad.losses._pairs import whole_pass
from exactness import leaf, random
from losses.samples import features, ids_of

SCALE = 3.0
COUNTS = (3, 1, 4)

LEARNED = {
    "clip": clip_loss,
    "supcon": lambda q, k, s: supcon_loss(q, k, s, torch.arange(len(q)), torch.arange(len(q))),
    "sigmoid_supcon": lambda q, k, s: sigmoid_supcon_loss(
        q, k, s, torch.arange(len(q)), torch.arange(len(q)), bias=-s
    ),
    "multiple_negatives": lambda q, k, s: multiple_negatives_loss(q, k, s, margin=0.5),
    "maxsim": lambda q, k, s: maxsim_loss(q[:, None], k[:, None], s),
}


@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.ranks(2)
def test_a_checkpointed_batch_of_another_size(rank, world, name):
    """The last one of an epoch, where the call that was expected does not come; the scale is learned."""
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    for rows in ((4, 4), (4, 4), (4, 4), (4, 1), (3, 4)):
        x = leaf(random((rows[rank], 5), 3 + rank))
        of_x = partial(lambda loss, x: loss(x.sin(), x.cos(), scale), LEARNED[name])
        got = torch.autograd.grad(checkpoint(of_x, x, use_reentrant=False), (x, scale))
        with ag.checked():  # in which no call is expected
            want = torch.autograd.grad(of_x(x), (x, scale))
        torch.testing.assert_close(got, want)


def losses(ids):
    """Each loss of queries and keys, with its formula; ids are those of the given rows."""
    return {
        "clip": (lambda q, k: clip_loss(q, k, SCALE), reference.clip),
        "siglip": (lambda q, k: siglip_loss(q, k, SCALE), reference.siglip),
        "info_nce": (lambda q, k: info_nce_loss(q, k, SCALE), reference.info_nce),
        "supcon": (lambda q, k: supcon_loss(q, k, SCALE, ids, ids), reference.supcon),
        "sigmoid_supcon": (
            lambda q, k: sigmoid_supcon_loss(q, k, SCALE, ids, ids),
            reference.sigmoid_supcon,
        ),
        "multiple_negatives": (
            lambda q, k: multiple_negatives_loss(q, k, SCALE),
            reference.multiple_negatives,
        ),
        "maxsim": (
            lambda q, k: maxsim_loss(q.unsqueeze(1), k.unsqueeze(1), SCALE),
            lambda q, k, scale: reference.maxsim([*q.unsqueeze(1)], [*k.unsqueeze(1)], scale),
        ),
    }


def check(rank, world, name, counts, width=5, **options):
    """Value and gradients of the loss of two towers inside a region, and how often it was computed."""
    ids = ids_of(counts, 1)
    whole, weight = leaf(torch.cat(features(counts, 10, width))), leaf(random((width, width), 2))
    formula = losses(None)[name][1]
    more = [torch.cat(ids)] * 2 if "supcon" in name else []
    want = formula((whole @ weight).sin(), (whole @ weight).cos(), SCALE, *more)
    by_whole, by_weight = torch.autograd.grad(want, (whole, weight))

    own, ours = leaf(whole.detach().split(counts)[rank]), leaf(weight.detach())
    loss, calls = losses(ids[rank])[name][0], []

    def region(x):
        calls.append(x)
        hidden = x @ ours
        return loss(hidden.sin(), hidden.cos())

    got = checkpoint(region, own, use_reentrant=False, **options)
    got.backward()
    assert len(calls) == 2
    tight = {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(got.detach(), want.detach(), **tight)
    torch.testing.assert_close(own.grad, world * by_whole.split(counts)[rank], **tight)
    summed = ours.grad.clone()
    if world > 1:
        torch.distributed.all_reduce(summed)
    torch.testing.assert_close(summed, world * by_weight, **tight)


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("name", losses(None))
def test_a_checkpointed_region_is_computed_twice(rank, world, name):
    check(rank, world, name, COUNTS[:world])


PRODUCTS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default")


def saving(is_saved):
    """The option of a checkpoint that saves the results of some ops."""

    def policy(context, op, *args, **options):
        return (
            CheckpointPolicy.MUST_SAVE if is_saved(str(op)) else CheckpointPolicy.PREFER_RECOMPUTE
        )

    return {"context_fn": partial(create_selective_checkpoint_contexts, policy)}


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("name", losses(None))
def test_a_region_that_saves_products_equals_the_formula(rank, world, name):
    """Pairs that every rank computes, and those of which each computes its rows; the same in a loop."""
    for up_to in (whole_pass.SMALL_UP_TO, 0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(whole_pass, "SMALL_UP_TO", up_to)
            for _ in range(5):  # from the third call on it is expected, in forward or in backward
                check(rank, world, name, COUNTS[:world], width=24, **saving(PRODUCTS.__contains__))


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("name", ["clip", "siglip", "info_nce"])
def test_saving_what_a_loss_changes_in_place_is_refused(rank, world, name):
    with pytest.raises(ModeError, match="selective activation checkpointing saved"):
        check(rank, world, name, COUNTS[:world], **saving(lambda op: "mm" in op))
