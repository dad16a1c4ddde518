"""Arguments that no loss can use, on one rank alone: an error on every rank, and nobody waits."""

import pytest
import torch

from allgrad.errors import InputError
from allgrad.losses import (
    KeyQueue,
    clip_loss,
    maxsim_loss,
    multiple_negatives_loss,
    supcon_loss,
)
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
    margin = "wide" if wrong else 0.5
    raises_everywhere(InputError, lambda: multiple_negatives_loss(x, x, 1.0, margin=margin), "rank")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.ranks(2)
def test_nested_tensors_of_either_layout(rank, world):
    generator = torch.Generator().manual_seed(rank)
    xs = [torch.randn(n, 4, generator=generator) for n in (2, 3)]
    want = maxsim_loss(xs, xs, 1.0)
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor(xs, layout=layout)
        torch.testing.assert_close(maxsim_loss(nested, nested, 1.0), want)
