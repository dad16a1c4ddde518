"""scan."""

import pytest
import torch

import allgrad as ag
import reference
from exactness import check_exact, grads, leaf, loss, pieces, place, same, with_layouts
from places import everywhere, on

REDUCTIONS = ("sum", "mean", "prod", "min", "max", "logsumexp")


def scan_exactly(group, op, exclusive, dtype):
    _, world = place(group)
    for shape in ((2, 3), (), (0, 2)):
        for layout, gradient_layouts in with_layouts("contiguous", "transposed"):
            check_exact(
                lambda x: ag.scan(x, op, exclusive=exclusive, group=group),
                lambda xs: reference.scan(xs, op, exclusive),
                pieces([shape] * world, dtype),
                group=group,
                layout=layout,
                gradient_layouts=gradient_layouts,
                # sin of an infinite value is no number; those losses are checked below.
            )


@pytest.mark.one_in(7)
@everywhere
@pytest.mark.parametrize("op", REDUCTIONS)
def test_scan_is_exact(where, op):
    on(where, scan_exactly, op, False, torch.float64)


@pytest.mark.one_in(7)
@everywhere
@pytest.mark.parametrize("op", ["sum", "prod"])
def test_scan_of_those_before_is_exact(where, op):
    on(where, scan_exactly, op, True, torch.float64)


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("op", ["min", "max", "logsumexp"])
def test_first_rank_gets_the_reduction_of_nothing(rank, world, op):
    xs = pieces([(3,)] * world)
    leaves = [x.clone().requires_grad_() for x in xs]
    wanted = reference.scan(leaves, op, exclusive=True)
    x = xs[rank].clone().requires_grad_()
    y = ag.scan(x, op, exclusive=True)
    assert torch.equal(y.detach(), wanted[rank].detach())
    w = torch.arange(1.0, 4.0, dtype=torch.float64) * (rank + 1)
    y.backward(w)
    weights = [torch.arange(1.0, 4.0, dtype=torch.float64) * (r + 1) for r in range(world)]
    for want_y, weight in list(zip(wanted, weights, strict=True))[1:]:
        want_y.backward(weight, retain_graph=True)
    want = leaves[rank].grad
    torch.testing.assert_close(x.grad, torch.zeros(3).double() if want is None else want)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("shape", [(2, 3), ()])
@pytest.mark.parametrize("op", ["prod", "max", "logsumexp"])
def test_second_derivative_of_a_linear_loss(rank, world, op, shape):
    """The gradient of the first rank depends on no piece: it comes to the call again all the same."""
    leaves = [leaf(x) for x in pieces([shape] * world)]
    wanted = [y.sum() for y in reference.scan(leaves, op, exclusive=True)[1:]]
    wanted_first = grads(sum(wanted), leaves, graph=True)
    want = grads(sum(loss(g, r) for r, g in enumerate(wanted_first)), leaves)
    x = leaf(pieces([shape] * world)[rank])
    (first,) = grads(ag.scan(x, op, exclusive=True).sum(), [x], graph=True)
    same(first.detach(), wanted_first[rank].detach(), "the first derivative")
    same(grads(loss(first, rank), [x])[0], want[rank], "the second derivative")


@pytest.mark.ranks(3)
@pytest.mark.parametrize("exclusive", [False, True])
def test_second_derivative_with_a_zero_on_the_first_rank(rank, world, exclusive):
    xs = pieces([(3,)] * world)
    xs[0][1] = 0
    leaves = [leaf(x) for x in xs]
    wanted = reference.scan(leaves, "prod", exclusive)
    wanted_first = grads(sum(y.sum() for y in wanted), leaves, graph=True)
    want = grads(sum(loss(g, r) for r, g in enumerate(wanted_first)), leaves)
    x = leaf(xs[rank])
    (first,) = grads(ag.scan(x, "prod", exclusive=exclusive).sum(), [x], graph=True)
    same(first.detach(), wanted_first[rank].detach(), "the first derivative")
    same(grads(loss(first, rank), [x])[0], want[rank], "the second derivative")


@pytest.mark.ranks(3)
def test_complex_and_whole_numbers(rank):
    scan_exactly(None, "sum", False, torch.complex128)
    scan_exactly(None, "prod", True, torch.complex128)
    x = torch.arange(3) + rank
    assert ag.scan(x, "max", exclusive=True).tolist() == (
        [torch.iinfo(torch.int64).min] * 3 if rank == 0 else [rank - 1, rank, rank + 1]
    )
    assert torch.equal(ag.scan(x), sum(torch.arange(3) + r for r in range(rank + 1)))
