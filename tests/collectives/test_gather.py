"""gather and scatter."""

import pytest
import torch

import allgrad as ag
import reference
from exactness import (
    SIZES,
    check_exact,
    laid_out,
    leaf,
    pieces,
    place,
    ragged_shapes,
    random,
    same,
)
from places import everywhere, on


def gather_exactly(group, kind, dtype):
    _, world = place(group)
    for dst in range(world):
        for dim in (0, 1, 2, -1, -3):
            check_exact(
                lambda x, dst=dst, dim=dim: ag.gather(x, dst, dim, group=group),
                lambda xs, dst=dst, dim=dim: reference.gather(xs, dst, dim),
                pieces(ragged_shapes(world, kind, dim % 3), dtype),
                group=group,
                layout="transposed",
            )


@pytest.mark.one_in(4)
@everywhere
@pytest.mark.parametrize("kind", SIZES)
def test_gather_is_exact(where, kind):
    on(where, gather_exactly, kind, torch.float64)


@pytest.mark.ranks(3)
def test_gather_with_sizes_given_and_of_complex(world):
    gather_exactly(None, "ragged", torch.complex128)
    check_exact(
        lambda x: ag.gather(x, 1, sizes=SIZES["ragged"][:3]),
        lambda xs: reference.gather(xs, 1),
        pieces(ragged_shapes(world, "ragged", 0)),
    )


@pytest.mark.ranks(1, 3)
def test_numbers_become_a_vector_on_dst(world):
    check_exact(
        lambda x: ag.gather(x, world - 1),
        lambda xs: reference.gather(xs, world - 1),
        pieces([()] * world),
    )


def scatter_exactly(group, dtype):
    """Off src any tensor may stand for None; its gradient is zero."""
    _, world = place(group)
    cuts = ((5, None), (2 * world, "equal"), (sum(SIZES["empty"][:world]), "list"))
    for src in range(world):
        for dim in (0, 1, 2, -1, -3):
            for length, sizes in cuts:
                shapes = [[2, 3, 2] for _ in range(world)]
                for r in range(world):  # off src a tensor of any length is ignored
                    shapes[r][dim] = length if r == src else r
                cut = SIZES["empty"][:world] if sizes == "list" else None
                check_exact(
                    lambda x, s=cut or sizes, src=src, dim=dim: ag.scatter(
                        x, src, dim, sizes=s, group=group
                    ),
                    lambda xs, src=src, dim=dim, cut=cut: reference.scatter(
                        xs[src], world, dim, cut
                    ),
                    pieces(shapes, dtype),
                    group=group,
                    layout="transposed",
                )


@pytest.mark.one_in(4)
@everywhere
def test_scatter_is_exact(where):
    on(where, scatter_exactly, torch.float64)


@pytest.mark.ranks(3)
def test_scatter_of_complex_is_exact():
    scatter_exactly(None, torch.complex128)


@pytest.mark.ranks(1, 3)
def test_off_src_there_may_be_no_tensor(rank, world):
    for dtype in (torch.float64, torch.float32, torch.int64, torch.bool):
        whole = (random((3, 5), 3) * 2).to(dtype)
        for dim in (0, 1):
            y = ag.scatter(whole if rank == world - 1 else None, world - 1, dim)
            want = reference.scatter(whole, world, dim)[rank]
            assert y.dtype == dtype
            assert y.requires_grad == dtype.is_floating_point
            assert torch.equal(y, want)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("layout", ["transposed", "slice", "expanded"])
def test_scatter_takes_gradients_of_any_strides(rank, world, layout):
    whole = random((5, 3), 3)
    x = leaf(whole) if rank == 1 else None
    y = ag.scatter(x, 1)
    upstream = [laid_out(random(p.shape, r), layout) for r, p in enumerate(whole.tensor_split(3))]
    y.backward(upstream[rank])
    if rank == 1:
        same(x.grad, torch.cat(upstream), "the joined gradient")


@pytest.mark.ranks(3)
def test_a_tensor_off_src_may_have_any_shape_and_dtype(rank, world):
    whole = random((5, 3), 3)
    others = (leaf(random((), 1)), leaf(random((4, 2, 2), 2)), torch.ones(3, dtype=torch.int64))
    x = leaf(whole) if rank == 1 else others[rank]
    y = ag.scatter(x, 1)
    same(y.detach(), whole.tensor_split(3)[rank], "the piece")
    y.sum().backward()
    if rank == 0:
        same(x.grad, torch.zeros_like(x), "the gradient of what was ignored")
    if rank == 1:
        same(x.grad, torch.ones_like(whole), "the gradient")


@pytest.mark.ranks(3)
def test_ranks_may_hold_other_nests_when_src_cuts_a_tensor(rank, world):
    x = random((4,), 5) if rank == 0 else {"a": torch.zeros(2), "b": torch.zeros(1)}
    assert torch.equal(ag.scatter(x), random((4,), 5).tensor_split(3)[rank])


@pytest.mark.ranks(3)
def test_scatter_of_an_empty_batch_of_vmap(rank, world):
    x = torch.zeros(0, 2, 6)
    assert torch.func.vmap(lambda x: ag.scatter(x, 1, -1))(x).shape == (0, 2, 2)
