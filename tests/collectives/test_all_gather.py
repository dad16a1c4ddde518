"""all_gather, reduce_scatter, split and sizes."""

import pytest
import torch
import torch.distributed as dist

import allgrad as ag
import reference
from allgrad._core.partition import even
from exactness import (
    SIZES,
    check_exact,
    grads,
    leaf,
    loss,
    pieces,
    place,
    ragged_shapes,
    random,
    same,
    with_layouts,
)
from places import everywhere, on

DIMS = (0, 1, 2, -1, -3)
REDUCTIONS = ("sum", "mean", "prod", "min", "max", "logsumexp")


def gather_exactly(group, kind, dtype, sizes_given):
    _, world = place(group)
    sizes = SIZES[kind][:world] if sizes_given == "list" else sizes_given
    for dim in DIMS:
        inputs = pieces(ragged_shapes(world, kind, dim % 3), dtype)
        for layout, gradient_layouts in with_layouts("contiguous", "transposed", "slice"):
            check_exact(
                lambda x, dim=dim: ag.all_gather(x, dim, sizes=sizes, group=group),
                lambda xs, dim=dim: reference.all_gather(xs, dim),
                inputs,
                group=group,
                layout=layout,
                gradient_layouts=gradient_layouts,
            )


@pytest.mark.one_in(4)
@everywhere
@pytest.mark.parametrize("kind", SIZES)
def test_all_gather_is_exact(where, kind):
    on(where, gather_exactly, kind, torch.float64, None)


@pytest.mark.parametrize("where", ["3 ranks", "ranks 1 and 3 of 4"])
def test_all_gather_of_complex_is_exact(where):
    on(where, gather_exactly, "ragged", torch.complex128, None)


@pytest.mark.parametrize(
    ("kind", "given"), [("ragged", "list"), ("empty", "list"), ("equal", "equal")]
)
def test_all_gather_with_sizes_given_is_exact(kind, given):
    on("3 ranks", gather_exactly, kind, torch.float64, given)


def gather_once(group, kind):
    _, world = place(group)
    for dim in DIMS:
        check_exact(
            lambda x, dim=dim: ag.all_gather(x, dim, group=group, grad="same"),
            lambda xs, dim=dim: reference.all_gather(xs, dim),
            pieces(ragged_shapes(world, kind, dim % 3)),
            group=group,
            first="once",
        )


@pytest.mark.one_in(7)
@everywhere
@pytest.mark.parametrize("kind", SIZES)
def test_all_gather_that_counts_once_keeps_the_own_part(where, kind):
    on(where, gather_once, kind)


@pytest.mark.ranks(3)
def test_same_gradient_needs_no_communication(rank):
    x = random((rank + 1, 2), rank).requires_grad_()
    y = ag.all_gather(x, grad="same")
    if rank == 1:  # alone: nobody else goes backward
        (g,) = grads((y * torch.arange(12.0).view(6, 2)).sum(), [x])
        same(g, torch.arange(2.0, 6.0, dtype=torch.float64).view(2, 2), "the own part")


@pytest.mark.ranks(3)
def test_no_gradient_on_request(rank):
    x = random((rank + 1,), rank).requires_grad_()
    y = ag.all_gather(x, grad="none")
    assert not y.requires_grad
    assert y.shape == (6,)
    with torch.no_grad():
        assert not ag.all_gather(x).requires_grad


@pytest.mark.ranks(1, 3)
def test_tensors_without_dimensions_become_a_vector(world):
    check_exact(ag.all_gather, reference.all_gather, pieces([()] * world))
    check_exact(
        lambda x: ag.all_gather(x, -1), reference.all_gather, pieces([()] * world, torch.complex128)
    )


def scatter_exactly(group, op, dtype):
    _, world = place(group)
    for dim in DIMS:
        for length, sizes in (
            (5, None),
            (2 * world, "equal"),
            (sum(SIZES["empty"][:world]), "list"),
        ):
            shape = [2, 3, 2]
            shape[dim] = length
            cut = SIZES["empty"][:world] if sizes == "list" else None
            for layout, gradient_layouts in with_layouts("contiguous", "transposed"):
                check_exact(
                    lambda x, dim=dim, s=cut or sizes: ag.reduce_scatter(
                        x, dim, op, sizes=s, group=group
                    ),
                    lambda xs, dim=dim, cut=cut: reference.reduce_scatter(xs, dim, op, cut),
                    pieces([shape] * world, dtype),
                    group=group,
                    layout=layout,
                    gradient_layouts=gradient_layouts,
                )


@pytest.mark.one_in(7)
@everywhere
@pytest.mark.parametrize("op", REDUCTIONS)
def test_reduce_scatter_is_exact(where, op):
    on(where, scatter_exactly, op, torch.float64)


@pytest.mark.parametrize("op", ["sum", "mean", "prod"])
def test_reduce_scatter_of_complex_is_exact(op):
    on("3 ranks", scatter_exactly, op, torch.complex128)


@pytest.mark.ranks(1, 3)
def test_reduce_scatter_of_one_number_gives_it_to_the_first_rank(world):
    check_exact(ag.reduce_scatter, reference.reduce_scatter, pieces([()] * world))


def split_exactly(group):
    _, world = place(group)
    for dim in DIMS:
        for length, sizes in (
            (5, None),
            (2 * world, "equal"),
            (sum(SIZES["empty"][:world]), "list"),
        ):
            shape = [2, 3, 2]
            shape[dim] = length
            cut = SIZES["empty"][:world] if sizes == "list" else None
            check_exact(
                lambda x, dim=dim, s=cut or sizes: ag.split(x, dim, sizes=s, group=group),
                lambda xs, dim=dim, cut=cut: reference.split(xs[0], world, dim, cut),
                pieces([shape]),
                group=group,
                layout="transposed",
                second="once",
            )


@everywhere
def test_split_is_exact(where):
    on(where, split_exactly)


@pytest.mark.ranks(1, 3)
def test_sizes_by_rank(rank, world):
    assert ag.gather_sizes(torch.zeros(2, rank + 1), 1) == tuple(range(1, world + 1))
    assert ag.gather_sizes(torch.zeros(rank), -1) == tuple(range(world))
    assert ag.gather_sizes(torch.zeros(())) == (1,) * world
    assert even(7, 3) == (3, 2, 2)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("needing", [0, 1])
def test_piece_without_gradient_takes_part(rank, world, needing):
    """Only one rank's piece needs a gradient, yet every rank's result requires it."""
    inputs = pieces(ragged_shapes(world, "ragged", 0))
    x = inputs[rank].requires_grad_(rank == needing)
    y = ag.all_gather(x)
    assert y.requires_grad
    loss(y, rank).backward()
    leaves = [leaf(p) for p in inputs]
    want = grads(sum(loss(torch.cat(leaves), r) for r in range(world)), leaves)
    if rank == needing:
        same(x.grad, want[rank], "the only gradient")
    else:
        assert x.grad is None


@pytest.mark.ranks(1, 2, 3, 4)
def test_contrastive_cross_entropy_with_ragged_batches(rank, world):
    """The case people meet first: own queries against everyone's keys."""
    batches = SIZES["ragged"][:world]
    queries = pieces([(b, 5) for b in batches], seed=1)
    keys = pieces([(b, 5) for b in batches], seed=2)

    def rank_loss(q, all_keys, r):
        logits = torch.einsum("id,jd->ij", q, all_keys)
        labels = torch.arange(batches[r]) + sum(batches[:r])
        return torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / sum(batches)

    qs, ks = [leaf(q) for q in queries], [leaf(k) for k in keys]
    total = sum(rank_loss(q, torch.cat(ks), r) for r, q in enumerate(qs))
    want_q, want_k = grads(total, qs), grads(total_again(qs, ks, rank_loss), ks)

    q, k = leaf(queries[rank]), leaf(keys[rank])
    rank_loss(q, ag.all_gather(k), rank).backward()
    same(q.grad, want_q[rank], "the queries' gradient")
    same(k.grad, want_k[rank], "the keys' gradient")


def total_again(qs, ks, rank_loss):
    return sum(rank_loss(q, torch.cat(ks), r) for r, q in enumerate(qs))


@pytest.mark.ranks(3)
def test_large_pieces_take_another_way_and_stay_exact(rank, world):
    """Above the plans' thresholds: broadcasts forward, exchange and add backward."""
    shapes = [(200_000 * (r + 1) + r,) for r in range(world)]
    inputs = pieces(shapes)
    check_exact(ag.all_gather, reference.all_gather, inputs, gradient_layouts=())


@pytest.mark.ranks(3)
@pytest.mark.parametrize("op", ["max", "min"])
def test_ties_share_equally_in_reduce_scatter(rank, op):
    x = torch.tensor([1.0, 2.0, 2.0], dtype=torch.float64).repeat(3)
    x[0] = x[0] + (rank == 1) * (1 if op == "max" else -1)
    xs = [torch.tensor([1.0, 2.0, 2.0], dtype=torch.float64).repeat(3) for _ in range(3)]
    xs[1][0] += 1 if op == "max" else -1
    check_exact(
        lambda x: ag.reduce_scatter(x, op=op), lambda xs: reference.reduce_scatter(xs, op=op), xs
    )
    assert torch.equal(x, xs[rank])


@pytest.mark.ranks(3)
def test_result_is_new_memory_even_alone(rank):
    x = torch.ones(3)
    for group in (None, dist.new_subgroups(1)[0]):
        for call in (ag.all_gather, ag.all_reduce, ag.broadcast, ag.scan, ag.all_to_all, ag.split):
            before = x.clone()
            with torch.no_grad():
                call(x, group=group).add_(1)
            assert torch.equal(x, before), call.__name__
