"""Bad input, seen from every rank."""

import pytest
import torch
import torch.distributed as dist

import allgrad as ag


def raises_everywhere(error, call, *parts):
    """Every rank gets this error, its message has the parts, and the group works afterwards."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    for part in parts:
        assert part in message, message
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    after = ag.all_gather(torch.tensor([rank]))
    assert after.tolist() == list(range(world))
