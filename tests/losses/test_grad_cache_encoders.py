"""grad_cache_step: both encodings of a micro-batch are one function, whatever the encoder reads and returns."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import allgrad as ag
from allgrad.errors import InputError
from allgrad.losses import clip_loss, grad_cache_step
from allgrad.nn import SyncBatchNorm
from exactness import random

NEAR = {"rtol": 1e-10, "atol": 1e-13}


def linear(inputs, outputs, dtype=torch.float64):
    torch.manual_seed(3)
    return nn.Linear(inputs, outputs, bias=False, dtype=dtype)


def batches(counts, rank):
    return [random((n, 5), 70 + 10 * rank + i) for i, n in enumerate(counts)]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("counts", [((3, 2), (2, 2)), ((3, 2, 2), (4,)), ((1,), (2, 3, 1))])
def test_collectives_of_the_encoder_join_the_same_micro_batches_twice(rank, world, counts):
    """Statistics of micro-batches of both ranks, and dropout: the same loss and gradient as in one graph."""

    def made():
        return nn.Sequential(
            linear(5, 6), SyncBatchNorm(6, dtype=torch.float64), nn.Dropout(0.4), linear(6, 4)
        )

    def loss(x):
        return clip_loss(x, x.flip(1), 2.0)

    mine, plain, model = batches(counts[rank], rank), made(), made()
    torch.manual_seed(50 + rank)
    value = grad_cache_step(model, mine, loss)
    drawn = torch.rand(1)
    # A rank with fewer begins with its last micro-batch, whose output nobody uses.
    torch.manual_seed(50 + rank)
    with torch.random.fork_rng():
        beside = [plain(mine[-1]) for _ in range(max(map(len, counts)) - len(mine))]
    outputs = [plain(batch) for batch in mine]
    want = loss(torch.cat(outputs))
    (want + sum(0 * x.sum() for x in beside)).backward()
    torch.testing.assert_close(value, want.detach(), **NEAR)
    for got, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad, wanted.grad, **NEAR)
    assert torch.equal(drawn, torch.rand(1))


class Centred(nn.Module):
    """Reads a buffer that each forward moves by the rank's own samples."""

    def __init__(self):
        super().__init__()
        self.linear = linear(5, 4)
        self.register_buffer("centre", torch.zeros(4, dtype=torch.float64))

    def forward(self, x):
        y = self.linear(x)
        moved = torch.tanh(y - self.centre)
        self.centre = 0.5 * self.centre + 0.5 * y.detach().mean(0)
        return moved


@pytest.mark.ranks(2)
@pytest.mark.parametrize("broadcast", [True, False])
def test_buffers_that_ddp_broadcasts(rank, world, broadcast):
    """Rank 0's in both encodings, and in the next step."""
    plain, model = (
        DistributedDataParallel(Centred(), broadcast_buffers=broadcast) for _ in range(2)
    )
    for step in range(3):
        x = random((4, 5), 10 * step + rank)
        for module in (plain, model):
            module.zero_grad()
        plain(x).square().mean().backward()
        grad_cache_step(model, [x], lambda y: y.square().mean())
        got, want = (m.module.linear.weight.grad for m in (model, plain))
        torch.testing.assert_close(got, want, **NEAR)
        torch.testing.assert_close(model.module.centre, plain.module.centre, **NEAR)
    centres = ag.all_gather(model.module.centre[None])
    assert not torch.equal(centres[0], centres[1])


def test_complex_outputs_have_gradients():
    encode, plain = linear(5, 4), linear(5, 4)

    def both(linear, x):
        y = linear(x)
        return torch.fft.rfft(y), y

    def loss(z, y):
        return z.abs().square().sum() + y.sum()

    mine = batches((3, 2), 0)
    grad_cache_step(lambda x: both(encode, x), mine, loss)
    loss(*both(plain, torch.cat(mine))).backward()
    torch.testing.assert_close(encode.weight.grad, plain.weight.grad, **NEAR)


def test_a_loss_may_change_its_arguments_in_place():
    encode, plain = linear(5, 4), linear(5, 4)

    def loss(x):
        return x.mul_(2).add_(1).square().sum()

    mine = batches((3, 2), 0)
    grad_cache_step(encode, mine, loss)
    loss(plain(torch.cat(mine))).backward()
    torch.testing.assert_close(encode.weight.grad, plain.weight.grad, **NEAR)


def test_one_number_for_each_row_without_a_graph_is_refused():
    encode = linear(5, 1)
    with pytest.raises(InputError, match="no output of encode requires grad"):
        grad_cache_step(lambda x: encode(x).detach()[:, 0], batches((3, 2), 0), torch.sum)


@pytest.mark.ranks(2)
def test_an_encoding_that_fails_leaves_the_buffers(rank, world):
    model = nn.Sequential(linear(5, 4), nn.BatchNorm1d(4, dtype=torch.float64))
    failing = True

    def encode(x):
        y = model(x)
        if failing and len(x) == 2:
            raise MemoryError
        return y

    with pytest.raises(MemoryError):
        grad_cache_step(encode, batches((3, 2), rank), lambda x: clip_loss(x, x, 2.0), models=model)
    assert not model[1].running_mean.any()
    assert model[1].num_batches_tracked == 0
    failing = False
    dist.barrier()
    grad_cache_step(encode, batches((3, 2), rank), lambda x: clip_loss(x, x, 2.0), models=model)
    assert model[1].num_batches_tracked == 2
