"""sentence-transformers: losses that gather across devices, with cached gradients too."""

from importlib.metadata import PackageNotFoundError, version

import pytest
import torch
from torch import nn

from allgrad.errors import InputError
from integrations.comparison import Comparison, needs

pytestmark = needs("sentence_transformers", "sentence-transformers")


class Encoder(nn.Module):
    """What a loss needs of a model: features in, a sentence or its tokens out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3).double()

    def forward(self, features):
        return {"sentence_embedding": self.linear(features["input_ids"])}


class TokenEncoder(Encoder):
    """One or two tokens a row; a batch is as long as its longest row."""

    def forward(self, features):
        x = features["input_ids"]
        mask = torch.stack([torch.ones(len(x)), x[:, 0] > 0], 1).bool()[
            :, : 1 + (x[:, 0] > 0).any()
        ]
        tokens = torch.stack([self.linear(x), self.linear(x.flip(1))], 1)[:, : mask.shape[1]]
        return {"token_embeddings": tokens, "attention_mask": mask}


class Passing(nn.Sequential):
    """Losses of token vectors name the task of a column; these encoders have one."""

    def forward(self, features, **_):
        return self[0](features)


def make(name, gathers, **options):
    import sentence_transformers.multi_vector_encoder.losses as multi
    import sentence_transformers.sentence_transformer.losses as single

    cls = getattr(single, name, None) or getattr(multi, name)
    return cls(Passing(Encoder()), gather_across_devices=gathers, **options)


def columns(x):
    whole = torch.ones(len(x), 1, dtype=torch.bool)
    return [{"input_ids": x[:, i], "attention_mask": whole} for i in (0, 1)]


def compare(name, encoder=Encoder, **options):
    def run(model, x, gathers, wrap=lambda loss: loss):
        loss = make(name, gathers, **options)
        loss.model = model
        return wrap(loss)(columns(x), None)

    def ours(model, x):
        from allgrad.integrations.sentence_transformers import GatheredLoss

        return run(model, x, True, GatheredLoss)

    return Comparison(
        lambda model, x: run(model, x, False),
        ours,
        lambda model, x: run(model, x, True),
        lambda: Passing(encoder()),
    )


COMPARISONS = {
    "MultipleNegativesRankingLoss": compare(
        "MultipleNegativesRankingLoss",
        directions=("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"),
    ),
    "CachedMultipleNegativesRankingLoss": compare(
        "CachedMultipleNegativesRankingLoss", mini_batch_size=1
    ),
    "MultiVectorMultipleNegativesRankingLoss": compare(
        "MultiVectorMultipleNegativesRankingLoss", TokenEncoder
    ),
}


def names():
    """Before 6.2 their cached losses let DDP send gradients in each mini-batch: unequal numbers hang."""
    try:
        known = tuple(map(int, version("sentence-transformers").split(".")[:2]))
    except PackageNotFoundError:
        known = (0, 0)
    too_old = pytest.mark.skipif(known < (6, 2), reason="hangs in DDP before 6.2")
    return [
        pytest.param(name, marks=too_old) if name.startswith("Cached") else name
        for name in COMPARISONS
    ]


@pytest.mark.parametrize("name", names())
def test_gradients_are_those_of_one_process(name):
    COMPARISONS[name].check()


@pytest.mark.ranks(2)
def test_the_block_takes_our_gather_out_again():
    from sentence_transformers.util import distributed

    from allgrad.integrations.sentence_transformers import exact_gather

    before = distributed.all_gather
    with exact_gather():
        assert distributed.all_gather is not before
    assert distributed.all_gather is before


@pytest.mark.ranks(2)
def test_a_loss_that_does_not_gather_is_refused():
    from allgrad.integrations.sentence_transformers import GatheredLoss

    loss = GatheredLoss(make("MultipleNegativesRankingLoss", gathers=False))
    assert loss.scale == loss.loss.scale  # trainers read the options of a loss
    with pytest.raises(InputError, match="gather_across_devices=True"):
        loss(columns(torch.randn(2, 2, 4).double()))
