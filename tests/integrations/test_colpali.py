"""colpali-engine: the loss of ContrastiveTrainer."""

import pytest
import torch

from integrations.comparison import Comparison, needs
from integrations.environment import accelerator

pytestmark = needs("colpali_engine", "colpali")


def make(name):
    import colpali_engine.loss

    return getattr(colpali_engine.loss, name)()


def documents(name, model, x):
    """Query and document vectors; of late interaction, one or two tokens a document."""
    left, right, _ = model(x)
    left, right = (
        torch.nn.functional.normalize(left, dim=1),
        torch.nn.functional.normalize(right, dim=1),
    )
    if "Bi" in name:
        return left, right
    tokens = torch.stack([right.flip(1), right], 1)
    keep = (x[:, 0, 0] > 0).any()  # padded on the left, by zeros
    tokens = tokens * torch.stack([x[:, 0, 0] > 0, torch.ones(len(x)).bool()], 1)[:, :, None]
    return left[:, None].repeat(1, 2, 1), tokens if keep else tokens[:, 1:]


def compare(name):
    def alone(model, x):
        query, document = documents(name, model, x)
        return make(name)(query_embeddings=query, doc_embeddings=document)

    def trained(trainer, model, x):
        with accelerator() as ready:
            made = trainer.__new__(trainer)  # the loss of a step needs nothing else of a trainer
            made.accelerator, made.loss_func = ready, make(name)
            return made._compute_loss_from_outputs(*documents(name, model, x))

    def theirs(model, x):
        from colpali_engine.trainer.contrastive_trainer import ContrastiveTrainer

        return trained(ContrastiveTrainer, model, x)

    def ours(model, x):
        from allgrad.integrations.colpali import ContrastiveTrainer

        return trained(ContrastiveTrainer, model, x)

    return Comparison(alone, ours, theirs)


COMPARISONS = {name: compare(name) for name in ["BiEncoderLoss", "ColbertLoss"]}


@pytest.mark.parametrize("name", COMPARISONS)
def test_gradients_are_those_of_one_process(name):
    COMPARISONS[name].check()
