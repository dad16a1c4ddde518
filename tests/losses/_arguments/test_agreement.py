"""Arguments that no loss can use, on one rank alone: an error on every rank, and nobody waits."""

import numpy as np
import pytest
import torch

import allgrad as ag
from allgrad.errors import AllgradError, InputError
from allgrad.losses import (
    KeyQueue,
    clip_loss,
    maxsim_loss,
    multiple_negatives_loss,
    sigmoid_supcon_loss,
    supcon_loss,
)
from losses.samples import features, ids_of
from refusals import raises_everywhere

IDS = torch.arange(3)
SPARSE = torch.eye(3, 4).to_sparse()
NESTED = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(1, 4)])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.ranks(2)
def test_wrong_arguments_of_one_rank(rank, world):
    x, wrong = torch.ones(3, 4), rank == 0
    for bad in (None, "x", SPARSE, NESTED):
        y = bad if wrong else x
        calls = {
            "query ": lambda y=y: multiple_negatives_loss(y, x, 1.0),
            "key ": lambda y=y: multiple_negatives_loss(x, y, 1.0),
            "query": lambda y=y: supcon_loss(y, x, 1.0, IDS, IDS),
            "image": lambda y=y: clip_loss(y, x, 1.0),
            "key": lambda y=y: KeyQueue(8, 4).push(y),
        }
        for name, call in calls.items():
            raises_everywhere(InputError, call, name.strip(), "rank 0")
    queue = torch.ones(8, 4) if wrong else None
    for call in (
        lambda: multiple_negatives_loss(x, x, 1.0, queue=queue),
        lambda: supcon_loss(x, x, 1.0, IDS, IDS, queue=queue),
    ):
        raises_everywhere(InputError, call, "Tensor, not a KeyQueue", "rank 0")
    other = KeyQueue(8 if wrong else 16, 4)
    raises_everywhere(InputError, lambda: multiple_negatives_loss(x, x, 1.0, queue=other), "queue")
    for margin in ("wide", "wide" if wrong else 0.5):  # of every rank, and of one
        for call in (
            lambda margin=margin: multiple_negatives_loss(x, x, 1.0, margin=margin),
            lambda margin=margin: supcon_loss(x, x, 1.0, IDS, IDS, margin=margin),
        ):
            raises_everywhere(InputError, call, "margin='wide'", "rank 0")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.ranks(2)
def test_nested_tensors_of_either_layout(rank, world):
    generator = torch.Generator().manual_seed(rank)
    xs = [torch.randn(n, 4, generator=generator) for n in (2, 3)]
    want = maxsim_loss(xs, xs, 1.0)
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor(xs, layout=layout)
        torch.testing.assert_close(maxsim_loss(nested, nested, 1.0), want)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.ranks(2)
def test_nested_features_with_sizes_are_refused(rank):
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(1, 4)], layout=layout)
        for arguments in ((nested, nested, 1.0), (torch.ones(2, 4), torch.ones(2, 4), nested)):
            with pytest.raises(AllgradError):
                clip_loss(*arguments, sizes=[2, 2])


@pytest.mark.ranks(3)
def test_ids_of_any_integer_dtype_and_numbers_of_numpy(rank, world):
    """Labels of datasets are often uint8, and a schedule gives a scale of NumPy."""
    counts = (2, 0, 3)
    x, y = (features(counts, seed, width=4)[rank] for seed in (1, 11))
    ids = ids_of(counts, 5)[rank]
    want = [supcon_loss(x, y, 2.0, ids, ids), multiple_negatives_loss(x, y, 2.0, ids=ids)]
    for dtype in (torch.int32, torch.int16, torch.int8, torch.uint8):
        own = ids.to(dtype if rank else torch.int64)  # ranks may differ
        scale = np.float32(2)
        got = [supcon_loss(x, y, scale, own, own), multiple_negatives_loss(x, y, scale, ids=own)]
        torch.testing.assert_close(got, want)
        queue = KeyQueue(8, 4, ids=True, dtype=torch.float64)
        queue.push(x, own)
        joined = ag.all_gather(ids, grad="none")
        assert queue.ids[-len(joined) :].tolist() == joined.tolist()
    raises_everywhere(
        InputError,
        lambda: supcon_loss(x, y, 2.0, ids.bool() if rank == 2 else ids, ids),
        "query_ids is not a vector of whole numbers",
    )


@pytest.mark.ranks(1, 2)
def test_a_missing_scale_raises_on_all(rank, world):
    x = torch.ones(3, 4)
    for scale in (None, None if rank == 0 else 2.0):  # of every rank, and of one
        for call in (
            lambda scale=scale: supcon_loss(x, x, scale, IDS, IDS),
            lambda scale=scale: sigmoid_supcon_loss(x, x, scale, IDS, IDS),
            lambda scale=scale: multiple_negatives_loss(x, x, scale),
            lambda scale=scale: maxsim_loss(x[None], x[None], scale),
        ):
            raises_everywhere(InputError, call, "scale is not a single finite number", "3, 4)")


@pytest.mark.ranks(2)
def test_a_bias_of_none_is_zero(rank, world):
    x = features((3, 2), 1, width=4)[rank]
    ids = IDS[: len(x)]
    want = sigmoid_supcon_loss(x, x, 2.0, ids, ids, bias=0.0)
    got = sigmoid_supcon_loss(x, x, 2.0, ids, ids, bias=None)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
