"""Where a check runs: worlds of 1 to 4, no world at all, a subgroup, a mesh, an axis of a mesh."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from allgrad.testing import run_ranks

WORLDS = {
    "no world": 0,
    "1 rank": 1,
    "2 ranks": 2,
    "3 ranks": 3,
    "4 ranks": 4,
    "ranks 1 and 3 of 4": 4,
    "mesh of 3": 3,
    "axis of a 2 x 2 mesh": 4,
}
everywhere = pytest.mark.parametrize("where", WORLDS)


def on(where, body, *args):
    """Run ``body(group, *args)`` on every rank of the place."""
    if WORLDS[where] == 0:
        body(None, *args)
    else:
        run_ranks(_in_group, WORLDS[where], where, body, args)


def _in_group(where, body, args):
    if where == "ranks 1 and 3 of 4":
        group = dist.new_group([1, 3])
        if dist.get_rank() in {1, 3}:
            body(group, *args)
    elif where == "mesh of 3":
        body(init_device_mesh("cpu", (3,)), *args)
    elif where == "axis of a 2 x 2 mesh":
        body((init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")), "a"), *args)
    else:
        body(None, *args)


def process_group(group):
    """What torch.distributed itself calls the group."""
    if group is None or isinstance(group, dist.ProcessGroup):
        return group
    return group[0].get_group(group[1]) if isinstance(group, tuple) else group.get_group()
