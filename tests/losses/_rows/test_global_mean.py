"""What a loss over rows keeps alive, and the messages of its second derivative, on ranks."""

import gc
import weakref

import pytest
import torch

from allgrad.losses import (
    KeyQueue,
    maxsim_loss,
    multiple_negatives_loss,
    reference,
    sigmoid_supcon_loss,
    supcon_loss,
)
from exactness import leaf, random

IDS = torch.arange(6) % 2

LOSSES = {
    "supcon": lambda q, k, queue: supcon_loss(q, k, 5.0, IDS, IDS, queue=queue),
    "sigmoid_supcon": lambda q, k, queue: sigmoid_supcon_loss(
        q, k, 5.0, IDS, IDS, bias=-1.0, queue=queue, key_weights=k.detach()[:, 0].exp()
    ),
    "multiple_negatives": lambda q, k, queue: multiple_negatives_loss(
        q, k, 5.0, symmetric=True, ids=IDS, queue=queue
    ),
    "multiple_negatives of pairs": lambda q, k, _: multiple_negatives_loss(q, k, 5.0),
    "maxsim": lambda q, k, _: maxsim_loss(q[:, None], k[:, None], 5.0, symmetric=True),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.ranks(2)
def test_nothing_is_kept_after_backward(rank, name):
    """Whoever adds up losses for a log keeps numbers, and no features, and no queue of each step."""
    x = leaf(random((6, 8), rank))
    queue = KeyQueue(10, 8, ids=True, dtype=torch.float64)
    queue.push(random((4, 8), 9 + rank), IDS[:4])
    q, k = 2 * x, 3 * x
    watched = [weakref.ref(held) for held in (q, k, queue.features)]
    loss = LOSSES[name](q, k, queue)
    del q, k
    queue.push(random((4, 8), 5 + rank), IDS[:4])
    loss.backward()
    gc.collect()
    assert [ref() is None for ref in watched] == [True] * 3
    assert loss.requires_grad


FORMULAS = {
    "supcon": (
        lambda q, k, ids: supcon_loss(q, k, 2.0, ids, ids),
        lambda q, k, ids: reference.supcon(q, k, 2.0, ids, ids),
    ),
    "multiple_negatives": (
        lambda q, k, ids: multiple_negatives_loss(q, k, 2.0, ids=ids),
        lambda q, k, ids: reference.multiple_negatives(q, k, 2.0, ids=ids),
    ),
    "maxsim": (
        lambda q, k, _: maxsim_loss(q[:, None], k[:, None], 2.0),
        lambda q, k, _: reference.maxsim(q[:, None], k[:, None], 2.0),
    ),
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", FORMULAS)
def test_second_derivatives_where_one_rank_has_frozen_keys(rank, world, name):
    """That rank takes part in the messages of the others' second derivatives."""
    loss, formula = FORMULAS[name]
    queries, keys = random((2 * world, 3), 1), random((2 * world, 3), 2)
    ids, own = torch.arange(2 * world) % 3, slice(2 * rank, 2 * rank + 2)
    mine = [leaf(queries[own]), keys[own].clone().requires_grad_(rank != 0)]
    first = grads(loss(*mine, ids[own]), [x for x in mine if x.requires_grad])
    (world * sum((g / world).square().sum() for g in first)).backward()

    whole = [leaf(queries), leaf(keys)]
    by_queries, by_keys = grads(formula(*whole, ids), whole)
    (by_queries.square().sum() + by_keys[2:].square().sum()).backward()
    for x, every in zip(mine, whole, strict=True):
        if x.requires_grad:
            torch.testing.assert_close(x.grad / world, every.grad[own], rtol=1e-10, atol=1e-13)


def grads(value, xs):
    return torch.autograd.grad(value, xs, create_graph=True)
