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


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.ranks(1, 3)
def test_inputs_that_hooks_copy_may_change(rank, name):
    """Such as those of save_on_cpu, whose gradients are as without hooks."""
    queue = KeyQueue(10, 8, ids=True, dtype=torch.float64)
    queue.push(random((4, 8), 9 + rank), IDS[:4])
    found = []
    for changed in (None, 0, 1):
        own = leaf(random((6, 8), rank)), leaf(random((6, 8), 5 + rank))
        given = [2 * x for x in own]
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):
            loss = LOSSES[name](*given, queue)
        if changed is not None:
            given[changed].detach().mul_(1.7)
        found.append(torch.autograd.grad(loss, own))
    for got in found[1:]:
        torch.testing.assert_close(got, found[0], rtol=1e-12, atol=1e-14)


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
@pytest.mark.parametrize("inputs_only", [False, True])
@pytest.mark.parametrize("name", FORMULAS)
def test_second_derivatives_where_one_rank_has_frozen_keys(rank, world, name, inputs_only):
    """That rank takes part in the messages of the others' second derivatives."""
    loss, formula = FORMULAS[name]
    queries, keys = random((2 * world, 3), 1), random((2 * world, 3), 2)
    ids, own = torch.arange(2 * world) % 3, slice(2 * rank, 2 * rank + 2)
    mine = [leaf(queries[own]), keys[own].clone().requires_grad_(rank != 0)]
    moved = [x for x in mine if x.requires_grad]
    first = grads(loss(*mine, ids[own]), moved)
    penalty = world * sum((g / world).square().sum() for g in first)
    penalty.backward(inputs=moved if inputs_only else None)

    whole = [leaf(queries), leaf(keys)]
    by_queries, by_keys = grads(formula(*whole, ids), whole)
    (by_queries.square().sum() + by_keys[2:].square().sum()).backward()
    for x, every in zip(mine, whole, strict=True):
        if x.requires_grad:
            torch.testing.assert_close(x.grad / world, every.grad[own], rtol=1e-10, atol=1e-13)


def grads(value, xs):
    return torch.autograd.grad(value, xs, create_graph=True)
