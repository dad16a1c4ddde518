"""Beside DDP, FSDP2 and DTensor: the parameters of one process trained on the joined batch."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

import allgrad as ag
from exactness import leaf, random, same

STEPS = 4


class Towers(nn.Module):
    """Two layers with everyone's features in the loss and a synchronised mean in between."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(5, 6).double()
        self.second = nn.Linear(6, 4).double()

    def forward(self, x, join, total):
        hidden = self.first(x).tanh()
        centre = total(hidden.sum(0)) / total(torch.tensor(float(len(x)), dtype=torch.float64))
        own = self.second(hidden - centre)
        return own, join(own)


def batches(world, step):
    return [random((r + 1 + step % 2, 5), 10 * step + r) for r in range(world)]


def loss(own, everyone, start):
    labels = torch.arange(start, start + len(own))
    picked = torch.nn.functional.cross_entropy(own @ everyone.T, labels, reduction="sum")
    return picked / len(everyone)


def train_alone(world):
    model = Towers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        own, everyone = model(torch.cat(batches(world, step)), lambda y: y, lambda t: t)
        optimizer.zero_grad()
        loss(own, everyone, 0).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def train(model, rank, world):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        pieces = batches(world, step)
        own, everyone = model(pieces[rank], ag.all_gather, ag.all_reduce)
        start = sum(len(p) for p in pieces[:rank])
        optimizer.zero_grad()
        (loss(own, everyone, start) * world).backward()  # the wrapper's mean divides by world
        optimizer.step()


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.ranks(2, 3)
def test_under_ddp(rank, world):
    model = DistributedDataParallel(Towers())
    train(model, rank, world)
    for got, want in zip(model.parameters(), train_alone(world), strict=True):
        close(got.detach(), want)


@pytest.mark.ranks(2, 3)
def test_under_fsdp(rank, world):
    model = Towers()
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(model, mesh=mesh)
    train(model, rank, world)
    for got, want in zip(model.parameters(), train_alone(world), strict=True):
        close(got.full_tensor().detach(), want)


@pytest.mark.ranks(2)
def test_beside_dtensors(rank, world):
    """from_local and to_local on both sides of a collective."""
    mesh = init_device_mesh("cpu", (world,))
    xs = [random((2, 3), r) for r in range(world)]
    x = leaf(xs[rank])
    sharded = DTensor.from_local(x, mesh, [Shard(0)])
    everyone = ag.all_gather(sharded.to_local().sin())
    whole = DTensor.from_local(everyone, mesh, [Replicate()]).to_local()
    ((rank + 1) * whole.square()).sum().backward()
    factor = sum(r + 1 for r in range(world))
    same(x.grad, factor * 2 * xs[rank].sin() * xs[rank].cos(), "the gradient")
    with pytest.raises(ag.errors.TensorError, match="to_local"):
        ag.all_gather(sharded)
    dist.barrier()
