"""Accelerate: gather with gradient, of unequal sizes."""

import pytest
import torch

from integrations.comparison import Comparison, needs, random
from integrations.environment import accelerator

pytestmark = needs("accelerate", "accelerate")


def contrastive(left, right):
    return torch.nn.functional.cross_entropy(left @ right.T, torch.arange(len(left)))


def theirs(model, x):
    with accelerator() as ready:
        return contrastive(*ready.gather(model(x)[:2]))


def ours(model, x):
    from allgrad.integrations.accelerate import Accelerator

    with accelerator(Accelerator) as ready:
        return contrastive(*ready.gather(model(x)[:2]))


COMPARISONS = {"gather": Comparison(lambda model, x: contrastive(*model(x)[:2]), ours, theirs)}


def test_gradients_are_those_of_one_process():
    COMPARISONS["gather"].check()


@pytest.mark.ranks(2)
def test_nests_and_scalars_are_gathered(rank):
    from allgrad.integrations.accelerate import Accelerator

    with accelerator(Accelerator) as ready:
        found = ready.gather({"loss": torch.tensor(float(rank)), "ids": torch.arange(rank + 1)})
        assert found["loss"].tolist() == [0.0, 1.0]
        assert found["ids"].tolist() == [0, 0, 1]
        metrics = ready.gather_for_metrics(torch.arange(rank + 1))
        assert metrics.tolist() == [0, 0, 1]


@pytest.mark.ranks(2)
def test_the_block_takes_our_gather_out_again(rank):
    from allgrad.integrations.accelerate import exact_gather

    with accelerator() as ready:
        before = ready.gather
        with exact_gather(ready):
            assert len(ready.gather(random(rank + 1, 2))) == 3
        assert ready.gather == before
        assert "gather" not in vars(ready)
