"""pylate: the contrastive loss over the documents of all ranks."""

import pytest
import torch
from torch import nn

from allgrad.errors import InputError
from integrations.comparison import Comparison, needs

pytestmark = needs("pylate", "pylate")


class Tokens(nn.Module):
    """One or two tokens a document; a batch is as long as its longest row."""

    skiplist = (0,)

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3).double()

    def forward(self, features):
        x = features["x"]
        tokens = torch.stack([self.linear(x), self.linear(x.flip(1))], 1)
        return {"token_embeddings": tokens[:, : features["input_ids"].shape[1]]}


def columns(x):
    """Token 0 is in the skiplist: the second token of some documents does not count."""
    found = []
    for i in (0, 1):
        second = (x[:, i, 0] > 0).long()
        ids = torch.stack([torch.ones(len(x)).long(), second], 1)
        ids = ids if i == 0 else ids[:, : 1 + second.max()]
        found.append({"x": x[:, i], "input_ids": ids, "attention_mask": torch.ones_like(ids)})
    return found


def compare(**options):
    def run(model, x, gathers, wrap=lambda loss: loss):
        from pylate.losses import Contrastive

        return wrap(Contrastive(model, gather_across_devices=gathers, **options))(columns(x))

    def ours(model, x):
        from allgrad.integrations.pylate import GatheredLoss

        return run(model, x, True, GatheredLoss)

    return Comparison(
        lambda model, x: run(model, x, False),
        ours,
        lambda model, x: run(model, x, True),
        Tokens,
    )


COMPARISONS = {
    "Contrastive": compare(),
    "Contrastive, sum": compare(size_average=False),
}


@pytest.mark.parametrize("name", COMPARISONS)
def test_gradients_are_those_of_one_process(name):
    COMPARISONS[name].check()


def test_cached_contrastive_is_refused():
    from pylate.losses import CachedContrastive

    from allgrad.integrations.pylate import GatheredLoss

    with pytest.raises(InputError, match="CachedContrastive is not a Contrastive loss"):
        GatheredLoss(CachedContrastive(Tokens()))
