"""The loss of each row keeps its digits where it is close to zero, as do its two derivatives."""

import pytest
import torch
from torch.nn.functional import normalize

import allgrad as ag
from allgrad.losses import (
    cross_entropy,
    maxsim_loss,
    multiple_negatives_loss,
    reference,
    supcon_loss,
)
from allgrad.losses._rows import recompute, relations
from exactness import random

COUNTS = (4, 1, 5)
TINY = (1e-3, 1e-6, 1e-9)


def features(dtype, tokens):
    """Pairs of nearly the same vectors, far from all others."""
    count = sum(COUNTS)
    query = random((count, tokens, 16), 1)
    key = query + 0.1 * random(query.shape, 2)
    return [normalize(x, dim=2).to(dtype).squeeze(1) for x in (query, key)]


def multiple_negatives(rows, query, key, scale):
    return multiple_negatives_loss(
        query[rows], key[rows], scale, symmetric=True, grad_reduction="sum"
    )


def supcon(rows, query, key, scale):
    """One positive for each query; its weight is without effect, and must not cost digits."""
    ids = torch.arange(len(query))[rows]
    weights = random((len(query),), 3).abs().to(query.dtype)[rows] + 0.1
    return supcon_loss(
        query[rows], key[rows], scale, ids, ids, key_weights=weights, grad_reduction="sum"
    )


def maxsim(rows, query, key, scale):
    return maxsim_loss(query[rows], key[rows], scale, symmetric=True, grad_reduction="sum")


LOSSES = {
    "multiple_negatives": (
        multiple_negatives,
        lambda q, k, s: reference.multiple_negatives(q, k, s, symmetric=True),
        1,
    ),
    "supcon": (supcon, reference.multiple_negatives, 1),
    "maxsim": (maxsim, lambda q, k, s: reference.maxsim(q, k, s, symmetric=True), 2),
}


def scale_of(formula, query, key, wanted):
    """The scale at which the loss is so small."""
    low, high = 1.0, 500.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if formula(query, key, middle) > wanted else (low, middle)
    return torch.tensor(low)


def differ(got, want):
    return (got.double() - want).norm() / want.norm()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.ranks(3)
def test_tiny_loss_keeps_its_digits(rank, world, name):
    loss, formula, tokens = LOSSES[name]
    given = features(torch.float32, tokens)
    rows = slice(sum(COUNTS[:rank]), sum(COUNTS[: rank + 1]))
    for tile, kept in (((1024, 8192), recompute.KEPT_SCORES), ((2, 3), 0)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(relations, "TILE", tile)
            patch.setattr(recompute, "KEPT_SCORES", kept)
            for tiny in TINY:
                wide = [x.double().requires_grad_() for x in given]
                scale = scale_of(formula, *(x.detach() for x in wide), tiny)
                wide.append(scale.double().requires_grad_())
                want = formula(*wide)
                own = [x.clone().requires_grad_() for x in (*given, scale)]
                got = loss(rows, *own)
                near = 40 * torch.finfo(torch.float32).eps * max(1, float(scale) / 10)
                assert abs(got.double() / want - 1) < near, (name, tiny)
                got.backward(retain_graph=True)
                parts = [ag.all_reduce(x.grad) for x in own]
                wanted = torch.autograd.grad(want, wide, create_graph=True)
                for part, whole in zip(parts, wanted, strict=True):
                    assert differ(part, whole) < near, (name, tiny)


@pytest.mark.parametrize("name", LOSSES)
def test_second_derivative_of_a_tiny_loss_keeps_its_digits(name):
    loss, formula, tokens = LOSSES[name]
    given = features(torch.float32, tokens)
    scale = scale_of(formula, *(x.double() for x in given), 1e-6)
    found = []
    runs = (torch.float32, lambda *x: loss(slice(None), *x)), (torch.float64, formula)
    for dtype, function in runs:
        own = [x.to(dtype).requires_grad_() for x in (*given, scale)]
        first = torch.autograd.grad(function(*own), own, create_graph=True)
        again = sum((random(x.shape, 7, dtype) * x).sum() for x in first[:2])
        found.append(torch.autograd.grad(again, own))
    for got, want in zip(*found, strict=True):
        assert differ(got, want) < 1e-4, name


LARGE = {
    "supcon": (
        lambda q, k: supcon_loss(q, k, 100.0, IDS, IDS),
        lambda q, k: reference.supcon(q, k, 100.0, IDS, IDS),
    ),
    "multiple_negatives": (
        lambda q, k: multiple_negatives_loss(q, k, 100.0),
        lambda q, k: reference.multiple_negatives(q, k, 100.0),
    ),
    "maxsim": (
        lambda q, k: maxsim_loss(q.view(8, 2, 8), k.view(8, 2, 8), 100.0),
        lambda q, k: reference.maxsim(q.view(8, 2, 8), k.view(8, 2, 8), 100.0),
    ),
    "cross_entropy": (
        lambda q, k: cross_entropy(100 * q, k, torch.arange(16)),
        lambda q, k: reference.cross_entropy(100 * q, k, torch.arange(16)),
    ),
}
IDS = torch.arange(16) // 2


@pytest.mark.parametrize("name", LARGE)
def test_derivatives_of_large_scores_keep_their_digits(name):
    """In float32, at the largest scale of CLIP: two derivatives, as near as those of the dense formula."""
    loss, formula = LARGE[name]
    for noise in (0.5, 10.0):
        query = normalize(random((16, 8), 1), dim=1)
        key = normalize(query + noise * random((16, 8), 2), dim=1)
        found = []
        for function, dtype in ((loss, torch.float32), (formula, torch.float64)):
            xs = [x.float().to(dtype).requires_grad_() for x in (query, key)]
            first = torch.autograd.grad(function(*xs), xs, create_graph=True)
            second = torch.autograd.grad(sum(g.square().sum() for g in first), xs)
            found.append([torch.cat(gs).double() for gs in (first, second)])
        for got, want, near in zip(*found, (1e-6, 2e-5), strict=True):
            assert (got - want).norm() <= near * want.norm(), (noise, near)
