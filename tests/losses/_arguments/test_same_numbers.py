"""Checked mode: a scale or a bias with another value on one rank raises on every rank."""

from functools import partial

import pytest
import torch

import allgrad as ag
from allgrad.errors import InputError
from allgrad.losses import (
    clip_loss,
    info_nce_loss,
    maxsim_loss,
    multiple_negatives_loss,
    siglip_loss,
    sigmoid_supcon_loss,
    supcon_loss,
)
from losses.samples import features
from refusals import raises_everywhere

COUNTS = (2, 1, 3)


def supcon(loss, query, key, scale, **options):
    ids = torch.arange(len(query))
    return loss(query, key, scale, ids, ids, **options)


def maxsim(query, key, scale):
    return maxsim_loss(query[:, None], key[:, None], scale)


LOSSES = {
    "clip_loss": clip_loss,
    "clip_loss, sizes": partial(clip_loss, sizes=COUNTS),
    "siglip_loss": siglip_loss,
    "siglip_loss, sizes": partial(siglip_loss, sizes=COUNTS),
    "info_nce_loss": info_nce_loss,
    "multiple_negatives_loss": multiple_negatives_loss,
    "supcon_loss": partial(supcon, supcon_loss),
    "sigmoid_supcon_loss": partial(supcon, sigmoid_supcon_loss),
    "maxsim_loss": maxsim,
}
WITH_BIAS = "siglip_loss", "siglip_loss, sizes", "sigmoid_supcon_loss"


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.ranks(3)
def test_another_value_on_one_rank_raises_on_every_rank(rank, world, name):
    loss, title = LOSSES[name], name.partition(",")[0]
    query, key = (features(COUNTS, seed)[rank] for seed in (10, 20))
    odd = 7.5 + 1e-9 * (rank == 1)
    for scale in (odd, torch.tensor(odd, dtype=torch.float64, requires_grad=True)):
        for _ in range(2):  # a call that was made before skips its checks
            loss(query, key, scale)
            with ag.checked():
                raises_everywhere(
                    *(InputError, partial(loss, query, key, scale)),
                    f"{title}: all ranks must have the same scale.\n",
                    "scale 7.500000001",
                    "   <- other scale\n",
                )
    if name in WITH_BIAS:
        with ag.checked():
            call = partial(loss, query, key, 7.5, bias=-2.0 if rank == 2 else -3.0)
            raises_everywhere(InputError, call, "have the same bias", "7.5, bias -2.0   <- oth")


@pytest.mark.parametrize("name", WITH_BIAS)
@pytest.mark.ranks(2)
def test_zeros_of_other_signs_are_the_same_number(rank, world, name):
    query, key = (features(COUNTS, seed)[rank] for seed in (10, 20))
    query, key = query[:1], key[:1]
    options = {"sizes": (1, 1)} if "sizes" in name else {}
    with ag.checked():
        assert LOSSES[name](query, key, 7.5, bias=-0.0 if rank else 0.0, **options) > 0


@pytest.mark.parametrize("name", [name for name in LOSSES if "sizes" not in name])
@pytest.mark.ranks(2)
def test_the_same_value_is_used_as_ever(rank, world, name):
    query, key = (features(COUNTS, seed)[rank].float().requires_grad_() for seed in (10, 20))
    # A number in Python, and one in float32, are the same where sums are in float32.
    scale = 0.1 if rank == 0 else torch.tensor(0.1)
    found = [LOSSES[name](query, key, scale)]
    with ag.checked():
        found.append(LOSSES[name](query, key, scale))
    found[1].backward()
    assert found[0] == found[1]
    assert query.grad is not None
