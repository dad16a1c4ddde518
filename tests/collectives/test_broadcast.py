"""broadcast and reduce."""

import pytest
import torch

import allgrad as ag
import reference
from exactness import check_exact, grads, leaf, loss, pieces, place, random, same
from places import everywhere, on

REDUCTIONS = ("sum", "mean", "prod", "min", "max", "logsumexp")
SHAPES = ((2, 3), (), (0, 2))


def broadcast_exactly(group, grad, dtype):
    _, world = place(group)
    for src in range(world):
        for shape in SHAPES:
            check_exact(
                lambda x, src=src: ag.broadcast(x, src, group=group, grad=grad),
                lambda xs, src=src: reference.broadcast(xs, src),
                pieces([shape] * world, dtype),
                group=group,
                layout="transposed",
                first="once" if grad == "same" else "each",
            )


@pytest.mark.one_in(4)
@everywhere
@pytest.mark.parametrize("grad", ["sum", "same"])
def test_broadcast_is_exact(where, grad):
    on(where, broadcast_exactly, grad, torch.float64)


def reduce_exactly(group, op, dtype):
    _, world = place(group)
    for dst in range(world):
        for shape in SHAPES:
            check_exact(
                lambda x, dst=dst: ag.reduce(x, dst, op, group=group),
                lambda xs, dst=dst: reference.reduce(xs, dst, op),
                pieces([shape] * world, dtype),
                group=group,
                layout="slice",
            )


@pytest.mark.one_in(7)
@everywhere
@pytest.mark.parametrize("op", REDUCTIONS)
def test_reduce_is_exact(where, op):
    on(where, reduce_exactly, op, torch.float64)


@pytest.mark.ranks(3)
def test_complex_numbers_are_exact():
    broadcast_exactly(None, "sum", torch.complex128)
    for op in ("sum", "mean", "prod"):
        reduce_exactly(None, op, torch.complex128)


@pytest.mark.ranks(3)
def test_a_large_reduce_takes_another_way_and_stays_exact(world):
    shape = (700_001,)
    check_exact(
        lambda x: ag.reduce(x, 1),
        lambda xs: reference.reduce(xs, 1),
        pieces([shape] * world),
        gradient_layouts=(),
    )


@pytest.mark.ranks(3)
def test_product_at_dst_with_two_zeros(world):
    xs = [torch.tensor(r, dtype=torch.float64) for r in ([0.0, 1.0], [0.0, 0.0], [2.0, 3.0])]
    check_exact(lambda x: ag.reduce(x, 2, "prod"), lambda xs: reference.reduce(xs, 2, "prod"), xs)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("shape", [(2, 3), ()])
@pytest.mark.parametrize("op", ["prod", "max", "logsumexp"])
def test_second_derivative_of_a_linear_loss(rank, world, op, shape):
    """The gradient depends on the pieces at dst alone: the others come to the call again all the same."""
    leaves = [leaf(x) for x in pieces([shape] * world)]
    wanted = grads(sum(y.sum() for y in reference.reduce(leaves, 1, op)), leaves, graph=True)
    want = grads(sum(loss(g, r) for r, g in enumerate(wanted)), leaves)
    x = leaf(pieces([shape] * world)[rank])
    (first,) = grads(ag.reduce(x, 1, op).sum(), [x], graph=True)
    same(first.detach(), wanted[rank].detach(), "the first derivative")
    same(grads(loss(first, rank), [x])[0], want[rank], "the second derivative")


@pytest.mark.ranks(3)
def test_only_the_piece_of_src_is_read(rank):
    x = random((2,), rank)
    got = ag.broadcast(x if rank == 1 else torch.full_like(x, float("nan")), 1)
    assert torch.equal(got, random((2,), 1))
