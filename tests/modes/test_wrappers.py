"""Beside the parallel wrappers: a model with collectives inside equals one process on the joined batch.

The model normalises each feature by the mean and the spread of the whole batch, and scores each row
against all rows: neither can be had from a part of the batch.
"""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as nnf
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

import allgrad as ag
from exactness import random

ROWS = (3, 1, 4)  # unequal batches
STEPS = 5


class Net(nn.Module):
    """With ``alone`` the whole batch is in this process."""

    def __init__(self, alone=False):
        super().__init__()
        torch.manual_seed(3)
        self.alone = alone
        self.first = nn.Linear(4, 6).double()
        self.second = nn.Linear(6, 6).double()

    def forward(self, x, targets):
        h = self.first(x)
        total, squares, n = self.over_ranks(
            (h.sum(0), h.square().sum(0), torch.tensor([float(len(h))]).double())
        )
        mean = total / n
        h = (h - mean) / (squares / n - mean.square() + 0.1).sqrt()
        z = nnf.normalize(self.second(h))
        scores = z @ self.joined(z).T
        return nnf.cross_entropy(scores, targets, reduction="sum") / 10

    def over_ranks(self, nest):
        return nest if self.alone else ag.all_reduce(nest)

    def joined(self, z):
        return z if self.alone else ag.all_gather(z)


def batch(step, world):
    """All rows of a step, and each rank's part of them."""
    rows = ROWS[:world]
    x = random((sum(rows), 4), 100 + step)
    targets = torch.randperm(sum(rows), generator=torch.Generator().manual_seed(step))
    return x, targets, list(zip(x.split(rows), targets.split(rows), strict=True))


def train_alone(world):
    """One process on the joined batch: the loss is the sum over all rows."""
    net = Net(alone=True)
    optimizer = torch.optim.SGD(net.parameters(), 0.3, momentum=0.9)
    for step in range(STEPS):
        x, targets, _ = batch(step, world)
        optimizer.zero_grad()
        net(x, targets).backward()
        optimizer.step()
    return [p.detach() for p in net.parameters()]


def train(model, parameters, rank, world, scale):
    """Each rank on its rows; ``scale`` makes up for a mean that the wrapper takes."""
    optimizer = torch.optim.SGD(parameters, 0.3, momentum=0.9)
    for step in range(STEPS):
        x, targets = batch(step, world)[2][rank]
        optimizer.zero_grad()
        (scale * model(x, targets)).backward()
        optimizer.step()


def check_equal(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.detach(), b, rtol=1e-10, atol=1e-10)


@pytest.mark.ranks(2, 3)
def test_ddp_takes_the_mean_over_ranks(rank, world):
    """DDP divides the summed gradients by the number of ranks: the loss is multiplied by it."""
    net = Net()
    train(DistributedDataParallel(net), net.parameters(), rank, world, world)
    check_equal(net.parameters(), train_alone(world))


@pytest.mark.ranks(2, 3)
def test_fsdp_takes_the_mean_over_ranks(rank, world):
    """So does FSDP, in the reduce_scatter of its gradients."""
    net = Net()
    mesh = init_device_mesh("cpu", (world,))
    for layer in (net.first, net.second):
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    train(net, net.parameters(), rank, world, world)
    check_equal([p.full_tensor() for p in net.parameters()], train_alone(world))


@pytest.mark.ranks(2, 3)
def test_without_a_wrapper_share_sums(rank, world):
    """``share`` on the parameters is all that data parallelism needs; no factor."""
    net = Net()
    names = [name for name, _ in net.named_parameters()]

    def model(x, targets):
        shared = ag.share(dict(net.named_parameters()))
        assert list(shared) == names
        return torch.func.functional_call(net, shared, (x, targets))

    train(model, net.parameters(), rank, world, 1)
    check_equal(net.parameters(), train_alone(world))


@pytest.mark.ranks(2, 3)
def test_dtensor_weights(rank, world):
    """Sharded weights as DTensors: to_local gives a piece, all_gather the whole, and gradients flow."""
    mesh = init_device_mesh("cpu", (world,))
    whole = random((6, 4), 1)
    sizes = [len(p) for p in whole.tensor_split(world)]
    piece = nn.Parameter(DTensor.from_local(whole.split(sizes)[rank].clone(), mesh, [Shard(0)]))
    alone = whole.clone().requires_grad_()
    optimizers = [torch.optim.SGD([p], 0.1) for p in (piece, alone)]
    for step in range(STEPS):
        x, _, parts = batch(step, world)
        for optimizer in optimizers:
            optimizer.zero_grad()
        weight = ag.all_gather(piece.to_local(), group=mesh)
        (parts[rank][0] @ weight.T).tanh().square().sum().backward()
        (x @ alone.T).tanh().square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    check_equal([piece.full_tensor()], [alone.detach()])
    joined = ag.all_gather(piece.to_local(), group=mesh)
    replicated = DTensor.from_local(joined, mesh, [Replicate()])
    check_equal([replicated.full_tensor()], [alone.detach()])


@pytest.mark.ranks(2)
def test_a_dtensor_itself_is_told_apart(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    x = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
    with pytest.raises(ag.errors.TensorError, match="to_local"):
        ag.all_gather(x, sizes="equal", group=dist.group.WORLD)
