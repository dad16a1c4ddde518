"""What wrappers do with gradients: said, and measured against one process."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from allgrad.errors import InputError
from allgrad.wrappers import gradient_scale, sum_gradients
from exactness import random

ROWS = (3, 0, 4)


def net(dtype=torch.float64):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def wrapped(kind, dtype, world):
    model = net(dtype)
    if kind == "DDP":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(model[0], mesh=mesh)  # a part with parameters of its own, and the rest
    return fully_shard(model, mesh=mesh)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_factor_is_what_is_measured(rank, world, kind, dtype):
    joined = random((sum(ROWS), 4), 1).to(dtype)
    alone = net(dtype)
    alone(joined).exp().sum().backward()
    for change in (None, sum_gradients):
        model = wrapped(kind, dtype, world)
        if change is not None:
            assert change(model) is model
        said = gradient_scale(model)
        assert said.wrapper == kind
        assert said.factor == (1 / world if change is None else 1)
        model(joined.split(ROWS)[rank]).exp().sum().backward()
        for p, want in zip(model.parameters(), alone.parameters(), strict=True):
            got = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            torch.testing.assert_close(got / said.factor, want.grad)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_inside_other_modules_and_compiled(rank, world, kind):
    for change, factor in ((nn.Identity(), 0.5), (sum_gradients, 1)):
        for around in (torch.compile, nn.Sequential, lambda m: torch.compile(nn.Sequential(m))):
            said = gradient_scale(around(change(wrapped(kind, torch.float64, world))))
            assert said == gradient_scale(change(wrapped(kind, torch.float64, world)))
            assert said.factor == factor
    assert gradient_scale(sum_gradients(torch.compile(wrapped(kind, torch.float64, world)))) == said
    mixed = nn.Sequential(wrapped(kind, torch.float64, world), nn.Linear(3, 1))
    with pytest.raises(InputError, match="wrapped in different ways"):
        gradient_scale(mixed)
    mixed[1].requires_grad_(False)
    assert gradient_scale(mixed).factor == 1 / world


@pytest.mark.ranks(2)
def test_fsdp2_between_forward_and_backward(rank, world):
    """There its parameters may be plain tensors; that is where a loss is divided."""
    mesh = init_device_mesh("cpu", (world,))
    model = fully_shard(net(), mesh=mesh)
    loss = model(random((2, 4), rank)).sum()
    assert gradient_scale(model).factor == 1 / world
    loss.backward()
    assert gradient_scale(model).factor == 1 / world
    model.unshard()
    assert gradient_scale(model).factor == 1 / world


@pytest.mark.ranks(2)
def test_fsdp2_beside_tensor_parallel(rank, world):
    """Only ranks with other samples take a mean."""
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(net(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    assert gradient_scale(fully_shard(model, mesh=mesh["dp"])).factor == 1


@pytest.mark.ranks(4)
@pytest.mark.parametrize("replicas", [1, 2])
def test_fsdp1_whose_shards_may_be_replicated(rank, world, replicas):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    hybrid = {"device_mesh": mesh, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    model = FullyShardedDataParallel(
        nn.Linear(2, 2, bias=False),
        device_id=torch.device("cpu"),
        **(hybrid if replicas == 2 else {}),
    )
    said = gradient_scale(model)
    model(torch.full((1, 2), float(rank + 1))).sum().backward()
    (gradient,) = (p.grad for p in model.parameters())
    assert said.factor == 1 / world
    assert set((gradient / said.factor).tolist()) == {10.0}  # 1 + 2 + 3 + 4


@pytest.mark.parametrize("accumulation", [0, -1])
def test_an_accumulation_of_nothing_is_refused(accumulation):
    with pytest.raises(InputError, match=f"accumulation={accumulation}"):
        gradient_scale(net(), accumulation=accumulation)


def test_other_wrappers_are_known_by_name():
    assert gradient_scale(net()).factor == 1
    alone = "no wrapper: .grad is 1 times this rank's own part; nothing is summed."
    assert str(gradient_scale(net())) == alone

    class DeepSpeedEngine(nn.Module):
        dp_world_size = 8

        def gradient_accumulation_steps(self):
            return 4

    assert gradient_scale(DeepSpeedEngine()).factor == 1 / 32
    assert "4 accumulation steps" in gradient_scale(DeepSpeedEngine()).why
    with pytest.raises(InputError, match="neither a DDP nor an FSDP2"):
        sum_gradients(net())
