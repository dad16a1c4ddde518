"""A deadline ends with its block; blocks may be nested."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import allgrad as ag
from allgrad._core.torch_internals import backend_timeout


@pytest.mark.ranks(2)
def test_deadline_ends_with_its_block(rank):
    """Other users of the group, DDP for one, wait as long as they did before."""
    own = backend_timeout(dist.group.WORLD)
    assert own > timedelta(seconds=100)
    with ag.deadline(50):
        ag.all_reduce(torch.ones(1))
        assert backend_timeout(dist.group.WORLD) == timedelta(seconds=50)
        with ag.deadline(20):
            ag.all_reduce(torch.ones(1))
            assert backend_timeout(dist.group.WORLD) == timedelta(seconds=20)
        assert backend_timeout(dist.group.WORLD) == timedelta(seconds=50)
    assert backend_timeout(dist.group.WORLD) == own
