"""torchmetrics: states of any shape, gathered with their gradients."""

import pytest
import torch

from integrations.comparison import Comparison, needs, random

pytestmark = needs("torchmetrics", "torchmetrics")


def metrics(name, model, x, **options):
    """A loss that is a metric of all rows, by the metric's own synchronisation."""
    import torchmetrics.regression

    metric = getattr(torchmetrics.regression, name)(dist_sync_on_step=True, **options)
    left, right, scale = model(x)
    inputs = (left, right) if name == "CosineSimilarity" else (left[:, 0] * scale, right[:, 0])
    return metric(*inputs)


def compare(name, **options):
    def ours(model, x):
        from allgrad.integrations.torchmetrics import gather_all_tensors

        return metrics(name, model, x, dist_sync_fn=gather_all_tensors, **options)

    def theirs(model, x):
        return metrics(name, model, x, **options)

    return Comparison(theirs, ours, theirs)


COMPARISONS = {
    "MeanSquaredError": compare("MeanSquaredError"),
    "CosineSimilarity": compare("CosineSimilarity", reduction="mean"),
}


@pytest.mark.parametrize("name", COMPARISONS)
def test_gradients_are_those_of_one_process(name):
    COMPARISONS[name].check()


@pytest.mark.ranks(2)
def test_every_dimension_may_differ(rank):
    from allgrad.integrations.torchmetrics import gather_all_tensors

    shapes = [(2, 3), (0, 4, 1)] if rank == 0 else [(5, 1), (2, 1, 2)]
    for shape in [*shapes, ()]:
        x = random(*shape, seed=rank)
        found = gather_all_tensors(x)
        assert len(found) == 2
        torch.testing.assert_close(found[rank], x)
        other = random(*found[1 - rank].shape, seed=1 - rank)
        torch.testing.assert_close(found[1 - rank], other)
