"""Ten steps under DDP and FSDP2 end at the parameters of one process on the joined batch."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import allgrad as ag
from allgrad.nn import (
    ColumnParallelLinear,
    HaloConv1d,
    RowParallelLinear,
    combine,
    convert,
    dispatch,
    minibatch_stddev,
    ring_attention,
)
from exactness import random

STEPS = 10
ROWS = (3, 0, 4)  # of the batch, or places of the sequence


class Critic(nn.Module):
    """Batch norms and the spread of the batch, trained with a gradient penalty."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Softplus(), nn.Flatten(), nn.Linear(16, 5)
        ).double()
        self.norm = nn.BatchNorm1d(5, dtype=torch.float64)
        self.head = nn.Linear(6, 1).double()

    def forward(self, x):
        x = x.detach().requires_grad_()
        score = self.head(minibatch_stddev(self.norm(self.body(x)).tanh()))
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return score.square().sum() + slope.square().sum()


class Sequence(nn.Module):
    """A convolution, attention and experts over a sequence that ranks share."""

    def __init__(self, alone=False):
        super().__init__()
        torch.manual_seed(4)
        self.alone = alone
        self.conv = nn.Conv1d(3, 6, 3, padding=1).double()
        if not alone:
            self.conv = HaloConv1d.from_plain(self.conv)
        self.qkv = nn.Linear(6, 18).double()
        self.router = nn.Linear(6, 3).double()
        self.experts = nn.ModuleList(nn.Linear(6, 6).double() for _ in range(3))

    def forward(self, x):
        h = self.conv(x.T.unsqueeze(0))[0].T
        q, k, v = (p.unflatten(1, (2, 3)).transpose(0, 1) for p in self.qkv(h).chunk(3, 1))
        h = h + self.attend(q, k, v).transpose(0, 1).flatten(1)
        gates, chosen = self.router(h).softmax(1).topk(2)
        return (h + self.mix(h, gates, chosen)).tanh().square().sum()

    def attend(self, q, k, v):
        if self.alone:
            return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return ring_attention(q, k, v, causal=True)

    def mix(self, h, gates, chosen):
        if self.alone:
            made = torch.stack([expert(h) for expert in self.experts], 1)
            picked = made.gather(1, chosen.unsqueeze(2).expand(-1, -1, 6))
            return (picked * gates.unsqueeze(2)).sum(1)
        sent = dispatch(h, chosen, experts=3)
        parts = zip(sent.tokens.split(sent.counts), sent.experts, strict=True)
        y = torch.cat([self.experts[e](t) for t, e in parts])
        # Every rank holds all experts here; DDP waits for the gradient of each.
        return combine(y, sent, gates) + sum(0 * p.sum() for p in self.experts.parameters())


SHAPES = {Critic: (2, 4, 4), Sequence: (3,)}


def batch(kind, step, rows):
    return random((sum(rows), *SHAPES[kind]), 100 + step)


def train(model, parameters, inputs, factor):
    optimizer = torch.optim.SGD(parameters, 0.02, momentum=0.9)
    for x in inputs:
        optimizer.zero_grad()
        (factor * model(x)).backward()
        optimizer.step()


def alone(kind, rows):
    model = kind(alone=True) if kind is Sequence else kind()
    train(model, model.parameters(), [batch(kind, s, rows) for s in range(STEPS)], 1)
    return model


def compare(got, want):
    for (name, a), (other, b) in zip(got, want, strict=True):
        assert name == other
        torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("kind", SHAPES)
def test_ddp(rank, world, kind):
    rows = ROWS[:world]
    inputs = [batch(kind, s, rows).split(rows)[rank] for s in range(STEPS)]
    model = convert(kind())
    train(DistributedDataParallel(model), model.parameters(), inputs, world)
    twin = alone(kind, rows)
    compare(model.named_parameters(), twin.named_parameters())
    compare(model.named_buffers(), twin.named_buffers())


@pytest.mark.ranks(3)
@pytest.mark.parametrize("kind", SHAPES)
def test_fsdp(rank, world, kind):
    rows = ROWS[:world]
    inputs = [batch(kind, s, rows).split(rows)[rank] for s in range(STEPS)]
    model = convert(kind())
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    train(model, model.parameters(), inputs, world)
    twin = alone(kind, rows)
    full = [(name, p.full_tensor()) for name, p in model.named_parameters()]
    compare(full, twin.named_parameters())


@pytest.mark.ranks(4)
def test_ddp_beside_parallel_linears(rank, world):
    """Two groups of two ranks: rows are split between the groups, features inside each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "features"))
    torch.manual_seed(5)
    twin = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    features = (mesh, "features")
    model = nn.Sequential(
        ColumnParallelLinear.from_plain(twin[0], group=features),
        nn.Tanh(),
        RowParallelLinear.from_plain(twin[2], group=features),
    )
    rows = (3, 2)
    inputs = [random((5, 4), s) for s in range(STEPS)]
    mine = [x.split(rows)[mesh.get_local_rank("data")] for x in inputs]
    wrapped = DistributedDataParallel(model, process_group=mesh.get_group("data"))
    train(lambda x: wrapped(x).square().sum(), model.parameters(), mine, 2)
    train(lambda x: twin(x).square().sum(), twin.parameters(), inputs, 1)
    compare(model[0].to_plain().named_parameters(), twin[0].named_parameters())
    compare(model[2].to_plain().named_parameters(), twin[2].named_parameters())
    assert ag.all_reduce(torch.ones(1)).item() == world
