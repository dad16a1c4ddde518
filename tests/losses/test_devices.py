"""Tensors of one rank on another device, or sparse: an error on every rank, and nobody waits.

The meta device stands for any other one.
"""

from functools import partial

import pytest
import torch

from allgrad.errors import InputError, TensorError
from allgrad.losses import (
    KeyQueue,
    clip_loss,
    cross_entropy,
    info_nce_loss,
    maxsim_loss,
    multiple_negatives_loss,
    siglip_loss,
    sigmoid_supcon_loss,
    supcon_loss,
)
from refusals import raises_everywhere

X = torch.arange(12.0).reshape(3, 4)
IDS = torch.arange(3)
WEIGHTS = torch.ones(3)


def elsewhere(x):
    return x.to("meta")


def pushed(key, ids):
    KeyQueue(8, 4, ids=True).push(key, ids)


def with_keywords(loss, *names):
    """The loss with its last arguments by name."""
    return lambda *args: loss(
        *args[: -len(names)], **dict(zip(names, args[-len(names) :], strict=True))
    )


SUPCON = (X, X, 2.0, IDS, IDS, WEIGHTS, WEIGHTS)
WEIGHED = "query_weights", "key_weights"
MORE = "hard_negatives", "ids", "hard_negative_ids", "weights"
# The call, its good arguments, and how each is named in the error, where it may be wrong.
CALLS = {
    "supcon": (
        with_keywords(supcon_loss, *WEIGHED),
        SUPCON,
        {1: "key", 3: "query_ids", 4: "key_ids", 5: "query_weights", 6: "key_weights"},
    ),
    "sigmoid_supcon": (
        with_keywords(sigmoid_supcon_loss, *WEIGHED),
        SUPCON,
        {1: "key", 3: "query_ids", 4: "key_ids"},
    ),
    "multiple_negatives": (
        with_keywords(multiple_negatives_loss, *MORE),
        (X, X, 2.0, X, IDS, IDS, WEIGHTS),
        {1: "key", 3: "hard_negatives", 4: "ids", 5: "hard_negative_ids", 6: "weights"},
    ),
    "maxsim": (maxsim_loss, (X[None], X[None]), {1: "document"}),
    "push": (pushed, (X, IDS), {1: "ids"}),
    "clip": (clip_loss, (X, X, torch.tensor(2.0)), {0: "text", 1: "text", 2: "scale"}),
    "siglip": (
        siglip_loss,
        (X, X, torch.tensor(2.0), torch.tensor(1.0)),
        {1: "text", 2: "scale", 3: "bias"},
    ),
    "info_nce": (
        info_nce_loss,
        (X, X, torch.tensor(2.0), X),
        {0: "key", 1: "key", 3: "hard_negatives"},
    ),
    "cross_entropy": (
        with_keywords(cross_entropy, "bias"),
        (X, X, IDS, WEIGHTS),
        {0: "weight", 1: "weight", 2: "targets", 3: "bias"},
    ),
}


@pytest.mark.ranks(1, 3)
def test_a_tensor_on_another_device_raises_on_all(rank, world):
    for call, good, wrong in CALLS.values():
        for place, says in wrong.items():
            given = list(good)
            if rank == world - 1:
                given[place] = elsewhere(given[place])
            raises_everywhere(TensorError, partial(call, *given), says, "device")


@pytest.mark.ranks(1, 3)
def test_a_sparse_tensor_raises_on_all(rank, world):
    for call, good, wrong in CALLS.values():
        for place in {0, *wrong}:
            given = list(good)
            if rank == world - 1:
                given[place] = given[place].to_sparse()
            raises_everywhere(InputError, partial(call, *given))


@pytest.mark.ranks(2)
def test_a_sparse_tensor_after_a_call_without_it(rank, world):
    """A call that was made before skips its checks."""
    call = partial(clip_loss, X, scale=2.0, sizes="equal")
    call(X)
    with pytest.raises(TensorError, match="text no dense tensor"):
        call(X.to_sparse())


@pytest.mark.ranks(2)
def test_all_tensors_of_one_rank_on_another_device_raise_on_all(rank, world):
    for call, good, _ in CALLS.values():
        given = [elsewhere(x) if rank and isinstance(x, torch.Tensor) else x for x in good]
        with pytest.raises((InputError, NotImplementedError)):
            call(*given)
    raises_everywhere(
        TensorError, partial(clip_loss, *([elsewhere(X)] * 2 if rank else [X] * 2), 2.0), "rank 1"
    )


@pytest.mark.ranks(2)
def test_a_queue_on_another_device_raises_on_all(rank, world):
    queue = KeyQueue(8, 4, ids=True, device="meta" if rank else "cpu")
    for call in (
        partial(multiple_negatives_loss, X, X, 2.0, ids=IDS, queue=queue),
        partial(supcon_loss, X, X, 2.0, IDS, IDS, queue=queue),
    ):
        raises_everywhere(TensorError, call, "queue", "device")
