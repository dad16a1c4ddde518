"""pytorch-metric-learning: losses and miners over the embeddings of all ranks."""

import pytest
import torch
from torch import nn

from allgrad.errors import InputError
from integrations.comparison import Comparison, Towers, needs, random

pytestmark = needs("pytorch_metric_learning", "pytorch-metric-learning")


def make(name, **options):
    import pytorch_metric_learning.losses

    return getattr(pytorch_metric_learning.losses, name)(**options)


def labelled(loss, model, x, miner=None):
    emb = torch.cat([*model(x)[:2]], 1).view(-1, 3)  # two rows of each pair, of one class
    labels = (x[:, :, 0] > 0).long().sum(1).repeat_interleave(2)
    return loss(emb, labels, None if miner is None else miner(emb, labels))


def wrappers(theirs):
    if theirs:
        from pytorch_metric_learning.utils import distributed
    else:
        from allgrad.integrations import pytorch_metric_learning as distributed
    return distributed.DistributedLossWrapper, distributed.DistributedMinerWrapper


def compare(name, mine=False, efficient=False, **options):
    def miner():
        from pytorch_metric_learning.miners import BatchHardMiner

        return BatchHardMiner()

    def alone(model, x):
        return labelled(make(name, **options), model, x, miner() if mine else None)

    def distributed(model, x, theirs):
        loss, miners = wrappers(theirs)
        given = {"efficient": True} if theirs and efficient else {}
        mined = miners(miner(), **given) if mine else None
        return labelled(loss(make(name, **options), **given), model, x, mined)

    return Comparison(
        alone,
        lambda model, x: distributed(model, x, theirs=False),
        lambda model, x: distributed(model, x, theirs=True),
    )


class WithProxies(Towers):
    """A model that holds a loss with parameters of its own."""

    def __init__(self):
        super().__init__()
        self.proxies = make("ProxyNCALoss", num_classes=3, embedding_size=3).double()


def proxied(theirs):
    def run(model, x):
        loss = getattr(model, "module", model).proxies
        return labelled(loss if theirs is None else wrappers(theirs)[0](loss), model, x)

    return run


COMPARISONS = {
    "NTXentLoss": compare("NTXentLoss"),
    "NTXentLoss, efficient": compare("NTXentLoss", efficient=True),
    "TripletMarginLoss, BatchHardMiner": compare("TripletMarginLoss", mine=True, margin=5.0),
    "ProxyNCALoss, its own proxies": Comparison(
        proxied(theirs=None),
        proxied(theirs=False),
        proxied(theirs=True),
        WithProxies,
    ),
}


@pytest.mark.parametrize("name", COMPARISONS)
def test_gradients_are_those_of_one_process(name):
    COMPARISONS[name].check()


@pytest.mark.ranks(2)
def test_the_memory_of_every_rank_is_that_of_one_process(rank):
    def memory():
        return make(
            "CrossBatchMemory", loss=make("ContrastiveLoss"), embedding_size=3, memory_size=8
        )

    x, labels = random(4, 3), torch.tensor([0, 1, 0, 1])
    alone, ours = memory(), memory()
    wrapped = wrappers(theirs=False)[0](ours)
    for _ in range(2):
        expected = alone(x, labels)
        loss = wrapped(x.split([3, 1])[rank], labels.split([3, 1])[rank])
        torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(ours.embedding_memory, alone.embedding_memory)


def test_efficient_is_refused():
    for wrapper, wrapped in zip(wrappers(theirs=False), (nn.Module(), nn.Module()), strict=True):
        with pytest.raises(InputError, match="efficient=True cannot be exact"):
            wrapper(wrapped, efficient=True)
