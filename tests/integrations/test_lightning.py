"""Lightning: the strategies' all_gather."""

import pytest
import torch

from allgrad.errors import PieceMismatch
from integrations.comparison import Comparison, needs, random

pytestmark = needs("lightning", "lightning")


def contrastive(left, right):
    return torch.nn.functional.cross_entropy(left @ right.T, torch.arange(len(left)))


def compare(which):
    def theirs(model, x):
        import lightning

        strategy = getattr(lightning, which).strategies.DDPStrategy()
        left, right = (strategy.all_gather(y, sync_grads=True) for y in model(x)[:2])
        return contrastive(left.flatten(0, 1), right.flatten(0, 1))

    def ours(model, x):
        import allgrad.integrations.lightning as made

        cls = made.FabricDDPStrategy if which == "fabric" else made.TrainerDDPStrategy
        strategy = cls()
        return contrastive(*(strategy.all_gather(y, sync_grads=True) for y in model(x)[:2]))

    return Comparison(lambda model, x: contrastive(*model(x)[:2]), ours, theirs)


COMPARISONS = {"Fabric": compare("fabric"), "Trainer": compare("pytorch")}


@pytest.mark.parametrize("name", COMPARISONS)
def test_gradients_are_those_of_one_process(name):
    COMPARISONS[name].check()


@pytest.mark.ranks(2)
def test_stacked_keeps_their_shape_and_needs_equal_tensors(rank):
    from allgrad.integrations.lightning import FabricDDPStrategy

    class Stacked(FabricDDPStrategy):
        stacked = True

    x = random(2, 3, seed=rank).requires_grad_()
    found = Stacked().all_gather(x)
    assert found.shape == (2, 2, 3)
    assert not found.requires_grad
    assert Stacked().all_gather(torch.tensor(float(rank))).tolist() == [0.0, 1.0]
    with pytest.raises(PieceMismatch, match="rank 1"):
        Stacked().all_gather(random(1 + rank, 3))
