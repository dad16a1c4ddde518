"""What a loss over rows keeps alive, on ranks."""

import gc
import weakref

import pytest
import torch

from allgrad.losses import (
    KeyQueue,
    maxsim_loss,
    multiple_negatives_loss,
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
