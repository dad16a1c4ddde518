"""Compiled with Inductor, which runs ops below autograd and uses the memory of intermediates again."""

import os
import shutil

import pytest
import torch
from torch.nn.functional import normalize

import allgrad as ag
from allgrad.losses import clip_loss, reference
from calls import EVERYTHING
from exactness import leaf, random

ROWS = (3, 2)
COMPILER = shutil.which(os.environ.get("CXX", "g++"))
KERNELS = pytest.mark.skipif(
    not EVERYTHING or COMPILER is None, reason="ALLGRAD_ALL=1 and a C++ compiler: half a minute"
)


def pieces(seed, rank=None):
    made = [random((n, 4), seed + r) for r, n in enumerate(ROWS)]
    return leaf(torch.cat(made) if rank is None else made[rank])


def number():
    return leaf(torch.tensor(3.0, dtype=torch.float64))


def alone(images, texts, scale, x):
    """Nothing but ops of ours: there is no kernel to compile."""
    return clip_loss(images, texts, scale), ag.all_gather(x)


def between_kernels(images, texts, scale, x):
    loss = clip_loss(normalize(images, dim=1), texts.sin(), scale.exp())
    return loss * 2, ag.all_gather(x.sin() * 2).cos()


def in_one_process(step, images, texts, scale, x):
    """The same functions of joined pieces."""
    if step is alone:
        return reference.clip(images, texts, scale), x
    loss = reference.clip(normalize(images, dim=1), texts.sin(), scale.exp())
    return loss * 2, (x.sin() * 2).cos()


@pytest.mark.parametrize("step", [alone, pytest.param(between_kernels, marks=KERNELS)])
@pytest.mark.timeout(400)
@pytest.mark.ranks(2, timeout=380)
def test_a_step_compiled_with_inductor_is_exact(rank, world, step):
    """Loss and pieces of all ranks, the gradients of both, and that of the scale."""
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="inductor")
    mine = pieces(10, rank), pieces(20, rank), number(), pieces(30, rank)
    found = compiled(*mine)
    weights = random((sum(ROWS), 4), 40)
    torch.autograd.backward(found, (None, (rank + 1) * weights))
    joined = pieces(10), pieces(20), number(), pieces(30)
    wanted = in_one_process(step, *joined)
    objective = world * wanted[0] + sum(range(1, world + 1)) * (wanted[1] * weights).sum()
    *by_rows, by_scale, by_x = torch.autograd.grad(objective, (joined[0], joined[1], *joined[2:]))
    own = slice(sum(ROWS[:rank]), sum(ROWS[: rank + 1]))
    got = [mine[0].grad, mine[1].grad, ag.all_reduce(mine[2].grad, grad="none"), mine[3].grad]
    want = [by_rows[0][own], by_rows[1][own], by_scale, by_x[own]]
    assert by_scale.abs() > 1e-3
    torch.testing.assert_close([*found, *got], [*wanted, *want], rtol=1e-10, atol=1e-14)


def without_large_intermediate(x, w):
    """Less memory is needed at a time where all_reduce goes first."""
    product = w @ w
    return ag.all_gather(x, sizes="equal"), ag.all_reduce(product) @ w[:, :1]


@pytest.mark.timeout(400)
@pytest.mark.ranks(2, timeout=380)
def test_inductor_moves_no_call(rank):
    """One rank compiles; the other makes the same calls in the order of the program."""
    torch._dynamo.reset()
    step = without_large_intermediate
    compiled = torch.compile(step, fullgraph=True, backend="inductor") if rank == 0 else step
    x, w = random((64, 8), rank), random((8, 8), 5)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, w), step(x, w), rtol=0, atol=0)
