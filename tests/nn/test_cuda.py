"""The layers on CUDA tensors: two Gloo ranks on one GPU get what they get on the CPU."""

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from allgrad.nn import (
    ColumnParallelLinear,
    HaloConv1d,
    RowParallelLinear,
    SyncBatchNorm,
    VocabParallelEmbedding,
    combine,
    dispatch,
    gathered_attention,
    minibatch_stddev,
    ring_attention,
)
from exactness import grads, leaf, loss, random, same

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def on(device, make, *args, **options):
    torch.manual_seed(0)
    return make(*args, dtype=torch.float64, **options).to(device)


def experts(x):
    routing = torch.tensor([[0, 3], [2, -1], [1, 1]], device=x.device)
    sent = dispatch(x.flatten(1), routing, experts=4, capacity=3)
    return combine(sent.tokens.sin(), sent, routing.to(x.dtype))


LAYERS = {
    "SyncBatchNorm": lambda x: on(x.device, SyncBatchNorm, 4)(x),
    "minibatch_stddev": minibatch_stddev,
    "linears": lambda x: on(x.device, RowParallelLinear, 6, 3)(
        on(x.device, ColumnParallelLinear, 5, 6)(x).tanh()
    ),
    "sequence parallel": lambda x: on(x.device, RowParallelLinear, 6, 3, sequence_dim=1)(
        on(x.device, ColumnParallelLinear, 5, 6, sequence_dim=1)(x).tanh()
    ),
    "embedding": lambda x: (
        x.sum()
        * on(x.device, VocabParallelEmbedding, 6, 2)(torch.tensor([5, 0, 3], device=x.device))
    ),
    "experts": experts,
    "ring": lambda x: ring_attention(x, x.sin(), x.cos(), causal=True),
    "gathered": lambda x: gathered_attention(x, x.sin(), x.cos(), causal=True),
    "conv": lambda x: on(x.device, HaloConv1d, 4, 2, 3, padding=1)(x),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", LAYERS)
def test_as_on_the_cpu(rank, world, name):
    x, z = (leaf(random((3, 4, 5), rank)) for _ in range(2))
    got, want = LAYERS[name](x.cuda()), LAYERS[name](z)
    assert got.is_cuda
    same(got.detach().cpu(), want.detach(), "the output")
    first = grads(loss(got.cpu(), rank), [x], graph=True), grads(loss(want, rank), [z], graph=True)
    same(first[0][0].detach(), first[1][0].detach(), "the gradient")
    second = grads(loss(first[0][0], rank), [x]), grads(loss(first[1][0], rank), [z])
    same(second[0][0], second[1][0], "the second derivative")


@pytest.mark.parametrize("attention", [ring_attention, gathered_attention])
def test_alone_it_is_torchs_kernel(attention):
    q, k, v = (torch.randn(2, 8, 256, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    ours = attention(*leaves, causal=True)
    torchs = scaled_dot_product_attention(*leaves, is_causal=True)
    assert torch.equal(ours, torchs)
    for a, b in zip(
        torch.autograd.grad(ours.sum(), leaves),
        torch.autograd.grad(torchs.sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_batch_norm_in_half_precision():
    x = torch.randn(8, 16, 4, 4, device="cuda", dtype=torch.float16)
    ours, torchs = SyncBatchNorm(16, device="cuda"), nn.BatchNorm2d(16, device="cuda")
    torch.testing.assert_close(ours(x), torchs(x), rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(ours.running_var, torchs.running_var)
