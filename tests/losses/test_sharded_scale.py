"""A scale that FSDP2 holds in pieces, used outside of its module's forward."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial

from allgrad.errors import AllgradError
from allgrad.losses import clip_loss, multiple_negatives_loss, reference
from exactness import random
from refusals import raises_everywhere

COUNTS = (3, 1, 2)
LOSSES = {
    "clip": clip_loss,
    "margin": lambda q, k, s, **how: multiple_negatives_loss(q, k, s, margin=9.0, **how),
}
FORMULAS = {
    "clip": reference.clip,
    "margin": lambda q, k, s: reference.multiple_negatives(q, k, s, margin=9.0),
}


class Scale(nn.Module):
    def __init__(self, length):
        super().__init__()
        self.value = nn.Parameter(torch.full((length,), 2.0, dtype=torch.float64))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.ranks(3)
def test_its_gradient_is_put_together_from_the_ranks_parts(rank, world, name):
    image, text = (random((sum(COUNTS), 4), seed) for seed in (1, 2))
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    FORMULAS[name](image, text, scale.exp()).backward()
    own = [x.split(COUNTS)[rank] for x in (image, text)]
    for how, together in (("mean", Partial("avg")), ("sum", Partial())):
        model = Scale(1)
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        whole = model.value.full_tensor(grad_placements=[together])
        LOSSES[name](*own, whole.exp(), grad_reduction=how).backward()
        torch.testing.assert_close(model.value.grad.full_tensor()[0], scale.grad)
        advice = "grad_placements"
        raises_everywhere(AllgradError, lambda: LOSSES[name](*own, model.value), advice)  # noqa: B023
