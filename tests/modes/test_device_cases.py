"""Every collective, mode and loss over several NCCL ranks on one GPU, where such an NCCL is found.

NCCL from 2.30 on lets ranks share a GPU if NCCL_MULTI_RANK_GPU_ENABLE=1 is set. ``ALLGRAD_ALL=1``
runs the same cases over Gloo on the host, so that only the backend differs.
"""

import os

import pytest
import torch

from allgrad.testing import run_ranks
from calls import EVERYTHING
from device_cases import CASES, ON_CUDA, Batch

NCCL = torch.cuda.is_available() and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
BACKENDS = {
    "gloo": ("cpu", EVERYTHING, "runs with ALLGRAD_ALL=1"),
    "nccl": ("cuda", NCCL, "needs a GPU that NCCL ranks may share"),
    "cpu:gloo,cuda:nccl": ("cuda", NCCL, "needs a GPU that NCCL ranks may share"),
}
BOTH = ("variants", "groups")  # what a group with both backends runs, too


@pytest.mark.timeout(90)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    ("backend", "group"),
    [
        *(("gloo", group) for group in CASES if group not in ON_CUDA),
        *(("nccl", group) for group in CASES),
        *(("cpu:gloo,cuda:nccl", group) for group in BOTH),
    ],
)
def test_cases_are_exact_on_every_rank(backend, group, world):
    device, runs, why_not = BACKENDS[backend]
    if not runs:
        pytest.skip(why_not)
    by_rank = run_ranks(Batch(group, device), world, backend=backend, timeout=60)
    assert by_rank == [list(CASES[group])] * world
