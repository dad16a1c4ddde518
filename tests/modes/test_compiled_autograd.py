"""Compiled autograd: torch records the whole backward pass as a graph and compiles it."""

import pytest
import torch
import torch._dynamo.compiled_autograd

import allgrad as ag
from allgrad import losses, nn
from exactness import leaf, random, same

IDS = torch.tensor([0, 1, 0])


def penalty(x):
    loss = losses.clip_loss(x, x.cos(), 2.0) + losses.siglip_loss(x, x.sin(), 2.0)
    (g,) = torch.autograd.grad(loss, x, create_graph=True)
    return g.square().sum()


PROGRAMS = {
    "calls": lambda x: ag.all_gather(x).sin().sum() + ag.all_reduce(x).cos().sum(),
    "async calls": lambda x: (
        ag.all_reduce(x, async_op=True).wait() * ag.shift(x.sin(), async_op=True).wait()
    ).sum(),
    "losses": lambda x: losses.clip_loss(x, x.cos(), 2.0) + losses.siglip_loss(x, x.sin(), 2.0),
    "losses in chunks": lambda x: (
        losses.supcon_loss(x, x.cos(), 2.0, IDS, IDS)
        + losses.supcon_loss(x, x.sin(), 2.0, IDS, IDS)
    ),
    "ring_attention": lambda x: (
        nn.ring_attention(*torch.stack([x, x.sin(), x.cos()])[:, None, None]).sin().sum()
    ),
    "gradient penalty": penalty,
}
# TorchDynamo 2.11 ends in errors of its own there, on every rank.
SINCE_2_13 = {"ring_attention", "gradient penalty"}


def gradients(program, *xs):
    """By the leaves, of plain autograd and of two steps of compiled autograd."""
    torch._dynamo.reset()
    program(*xs).backward()
    yield [x.grad for x in xs]
    for _ in range(2):
        for x in xs:
            x.grad = None
        result = program(*xs)
        with torch._dynamo.compiled_autograd._enable(
            lambda graph: torch.compile(graph, backend="aot_eager")
        ):
            result.backward()
        yield [x.grad for x in xs]


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
@pytest.mark.parametrize("name", PROGRAMS)
def test_several_calls_as_in_plain_autograd(rank, name):
    if name in SINCE_2_13 and torch.__version__ < "2.13":
        pytest.skip("TorchDynamo before 2.13 does not trace its backward")
    (want,), *found = gradients(PROGRAMS[name], leaf(random((3, 4), rank)))
    for (got,) in found:
        same(got, want, "the gradient")


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_pieces_without_gradient_take_part(rank):
    """Only rank 0's pieces require grad; rank 1 comes to both calls of backward."""

    def program(a, b):
        pieces = (a, b) if rank == 0 else (a.detach(), b.detach())
        y, z = map(ag.all_reduce, pieces)
        return (y * z.sin()).sum()

    want, *found = gradients(program, leaf(random((3,), rank)), leaf(random((3,), 5 + rank)))
    for got in found:
        for a, b in zip(got, want, strict=True):
            assert (a is None) == (b is None) == (rank == 1)
            if b is not None:
                same(a, b, "the gradient")
