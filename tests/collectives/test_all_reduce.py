"""all_reduce and share."""

import pytest
import torch
import torch.distributed as dist

import allgrad as ag
import reference
from allgrad.collectives import all_reduce as module
from exactness import check_exact, grads, leaf, loss, pieces, place, random, same, with_layouts
from places import everywhere, on

REDUCTIONS = ("sum", "mean", "prod", "min", "max", "logsumexp")
SHAPES = ((2, 3), (), (0, 2), (5,))


def reduce_exactly(group, op, dtype):
    _, world = place(group)
    for shape in SHAPES:
        for layout, gradient_layouts in with_layouts("contiguous", "transposed", "slice"):
            check_exact(
                lambda x: ag.all_reduce(x, op, group=group),
                lambda xs: reference.all_reduce(xs, op),
                pieces([shape] * world, dtype),
                group=group,
                layout=layout,
                gradient_layouts=gradient_layouts,
            )


@pytest.mark.one_in(7)
@everywhere
@pytest.mark.parametrize("op", REDUCTIONS)
def test_all_reduce_is_exact(where, op):
    on(where, reduce_exactly, op, torch.float64)


@pytest.mark.parametrize("op", ["sum", "mean", "prod"])
def test_all_reduce_of_complex_is_exact(op):
    on("3 ranks", reduce_exactly, op, torch.complex128)


def reduce_in_shares(group, op):
    module._WHOLE_PIECES_UP_TO = -1
    try:
        reduce_exactly(group, op, torch.float64)
        reduce_once(group, op)
    finally:
        module._WHOLE_PIECES_UP_TO = 256 * 1024


@pytest.mark.one_in(4)
@pytest.mark.parametrize("op", ["prod", "min", "max", "logsumexp"])
@pytest.mark.parametrize("where", ["1 rank", "3 ranks", "ranks 1 and 3 of 4"])
def test_large_tensors_are_reduced_in_shares(where, op):
    on(where, reduce_in_shares, op)


def reduce_once(group, op):
    _, world = place(group)
    for shape in SHAPES:
        check_exact(
            lambda x: ag.all_reduce(x, op, group=group, grad="same"),
            lambda xs: reference.all_reduce(xs, op),
            pieces([shape] * world),
            group=group,
            first="once",
        )


@pytest.mark.one_in(7)
@everywhere
@pytest.mark.parametrize("op", REDUCTIONS)
def test_all_reduce_that_counts_once(where, op):
    on(where, reduce_once, op)


def share_exactly(group):
    _, world = place(group)
    for shape in SHAPES:
        check_exact(
            lambda x: ag.share(x, group=group),
            lambda xs: [xs[0]] * world,
            pieces([shape]),
            group=group,
            layout="transposed",
            second="once",
        )


@everywhere
def test_share_sums_the_gradients(where):
    on(where, share_exactly)


@pytest.mark.ranks(3)
def test_share_then_same_is_a_split_layer(rank, world):
    """The column and row parts of a linear layer, as in tensor parallelism."""
    v, first = random((4, 3), 1), random((3, 6), 2)
    second = random((6, 3), 3)
    part = slice(2 * rank, 2 * rank + 2)
    x, a, b = leaf(v), leaf(first[:, part]), leaf(second[part])
    y = ag.all_reduce((ag.share(x) @ a).tanh() @ b, grad="same")
    loss(y, 0).backward()
    wx, wa, wb = leaf(v), leaf(first), leaf(second)
    loss((wx @ wa).tanh() @ wb, 0).backward()
    same(x.grad, wx.grad, "the input's gradient")
    same(a.grad, wa.grad[:, part], "the first part's gradient")
    same(b.grad, wb.grad[part], "the second part's gradient")


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("grad", ["sum", "same"])
def test_ties_share_the_gradient_equally(world, op, grad):
    rows = [[1.0, 5.0, 2.0, 0.0], [1.0, 2.0, 2.0, 0.0], [0.0, 5.0, 3.0, 0.0], [1.0, 1.0, 1.0, 0.0]]
    check_exact(
        lambda x: ag.all_reduce(x, op, grad=grad),
        lambda xs: reference.all_reduce(xs, op),
        [torch.tensor(r, dtype=torch.float64) for r in rows[:world]],
        first="once" if grad == "same" else "each",
    )


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("grad", ["sum", "same"])
def test_product_with_one_and_with_two_zeros(world, grad):
    rows = [[0.0, 0.0, 2.0], [3.0, 0.0, 0.5], [2.0, 4.0, 1.0], [2.0, 3.0, 0.0]]
    check_exact(
        lambda x: ag.all_reduce(x, "prod", grad=grad),
        lambda xs: reference.all_reduce(xs, "prod"),
        [torch.tensor(r, dtype=torch.float64) for r in rows[:world]],
        first="once" if grad == "same" else "each",
    )


@pytest.mark.ranks(3)
def test_not_a_number_and_infinities_are_kept(rank):
    inf, nan = float("inf"), float("nan")
    rows = [[nan, 1.0, -inf, inf], [1.0, nan, -inf, 2.0], [2.0, 1.0, -inf, nan]]
    xs = [torch.tensor(r, dtype=torch.float64) for r in rows]
    for op in REDUCTIONS:
        got = ag.all_reduce(xs[rank], op).detach()
        torch.testing.assert_close(got, reference.all_reduce(xs, op)[0], equal_nan=True)


@pytest.mark.ranks(2)
def test_reduce_op_of_torch_is_understood(rank):
    x = torch.tensor([1.0 + rank, 3.0 - rank])
    meant = {"SUM": "sum", "AVG": "mean", "PRODUCT": "prod", "MIN": "min", "MAX": "max"}
    for name, op in meant.items():
        given = getattr(dist.ReduceOp, name)
        assert torch.equal(ag.all_reduce(x, given), ag.all_reduce(x, op)), name
        assert torch.equal(ag.all_reduce(x, dist.ReduceOp(given)), ag.all_reduce(x, op)), name


@pytest.mark.ranks(3)
def test_unused_dtype_of_the_backend_is_summed_all_the_same(rank):
    x = torch.arange(7, dtype=torch.int16) + rank
    assert torch.equal(ag.all_reduce(x), 3 * torch.arange(7, dtype=torch.int16) + 3)
    assert torch.equal(ag.reduce(x, 1), (3 * torch.arange(7) + 3).short() * (rank == 1))


@pytest.mark.ranks(3)
def test_no_gradient_on_request(rank):
    x = random((3,), rank).requires_grad_()
    for op in REDUCTIONS:
        assert not ag.all_reduce(x, op, grad="none").requires_grad
    assert not ag.broadcast(x, grad="none").requires_grad


@pytest.mark.ranks(2)
def test_same_gradient_needs_no_communication(rank):
    x = random((3,), rank).requires_grad_()
    ys = [ag.all_reduce(x, op, grad="same") for op in REDUCTIONS]
    if rank == 0:  # alone: nobody else goes backward
        assert all(grads(y.sum(), [x])[0].isfinite().all() for y in ys)


@pytest.mark.ranks(2)
def test_third_derivative(rank, world):
    inputs = pieces([(2,)] * world)
    leaves = [leaf(x) for x in inputs]
    value = sum(loss(y, r) for r, y in enumerate(reference.all_reduce(leaves)))
    x = leaf(inputs[rank])
    mine = loss(ag.all_reduce(x), rank)
    for _ in range(3):
        want, (got,) = grads(value, leaves, graph=True), grads(mine, [x], graph=True)
        same(got.detach(), want[rank].detach(), "a derivative")
        value, mine = sum(g.square().sum() for g in want), got.square().sum()
