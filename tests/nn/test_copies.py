"""Copies of layers and losses that hold a process group."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from allgrad.integrations import JoinedLoss
from allgrad.losses import ClipLoss, InfoNCELoss, KeyQueue, SigLipLoss
from allgrad.nn import ColumnParallelLinear, HaloConv1d, SyncBatchNorm, VocabParallelEmbedding


@pytest.mark.ranks(2)
def test_a_deep_copy_has_its_own_parameters_and_the_same_group():
    group = dist.new_group([0, 1])
    parts = [
        *(ColumnParallelLinear(4, 6, group=group), VocabParallelEmbedding(6, 4, group=group)),
        *(SyncBatchNorm(6, group=group), HaloConv1d(1, 1, 3, padding=1, group=group)),
        *(ClipLoss(group=group), SigLipLoss(group=group), InfoNCELoss(group=group)),
        *(KeyQueue(4, 2, group=group), JoinedLoss(nn.MSELoss(), group=group)),
    ]
    model = nn.ModuleList(parts)
    made = copy.deepcopy(model)
    assert all(part.group is group for part in made)
    assert made[0].weight is not model[0].weight
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(made[0](x), model[0](x), rtol=0, atol=0)


def test_a_printed_layer_shows_its_sizes():
    parts = ColumnParallelLinear(4, 6), VocabParallelEmbedding(6, 4), KeyQueue(8, 4)
    assert [str(part) for part in parts] == [
        "ColumnParallelLinear(4, 6, bias=True, sizes=(6,))",
        "VocabParallelEmbedding(6, 4, sizes=(6,))",
        "KeyQueue(8, 4, ids=False)",
    ]
