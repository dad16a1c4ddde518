"""permute and shift."""

import contextlib

import numpy as np
import pytest
import torch

import allgrad as ag
import reference
from allgrad.errors import GroupError, InputError
from exactness import SIZES, check_exact, pieces, place, ragged_shapes, same
from places import everywhere, on
from refusals import raises_everywhere

PAIRS = {
    "cycle": lambda world: [(r, (r + 1) % world) for r in range(world)],
    "swap": lambda world: [(0, world - 1), (world - 1, 0)] if world > 1 else [(0, 0)],
    "one way": lambda world: [(0, world - 1)],
    "nobody": lambda _: [],
}


def permute_exactly(group, which, dtype):
    _, world = place(group)
    pairs = PAIRS[which](world)
    for kind in SIZES:
        for dim in (0, 1, -1):
            check_exact(
                lambda x, dim=dim: ag.permute(x, pairs, dim=dim, group=group),
                lambda xs: reference.permute(xs, pairs),
                pieces(ragged_shapes(world, kind, dim % 3), dtype),
                group=group,
                layout="transposed",
            )


@pytest.mark.one_in(7)
@everywhere
@pytest.mark.parametrize("which", PAIRS)
def test_permute_is_exact(where, which):
    on(where, permute_exactly, which, torch.float64)


def shift_exactly(group):
    _, world = place(group)
    for offset in (1, -1, 2, 0, world + 1):
        for wrap in (True, False):
            check_exact(
                lambda x, o=offset, w=wrap: ag.shift(x, o, wrap=w, group=group),
                lambda xs, o=offset, w=wrap: reference.shift(xs, o, w),
                pieces(ragged_shapes(world, "empty", 0)),
                group=group,
            )


@everywhere
def test_shift_is_exact(where):
    on(where, shift_exactly)


@pytest.mark.ranks(3)
def test_numbers_complex_and_given_sizes(world):
    permute_exactly(None, "cycle", torch.complex128)
    check_exact(ag.shift, lambda xs: [x.reshape(1) for x in reference.shift(xs)], pieces([()] * 3))
    check_exact(
        lambda x: ag.shift(x, sizes=SIZES["ragged"][:3]),
        reference.shift,
        pieces(ragged_shapes(world, "ragged", 0)),
    )
    check_exact(lambda x: ag.shift(x, sizes="equal"), reference.shift, pieces([(2, 3)] * 3))


@pytest.mark.ranks(3)
def test_pairs_from_an_iterator(rank, world):
    """In checked mode too, where the ranks compare the pairs, and not where each keeps its iterator."""
    xs = pieces([(2,), (1,), (3,)])
    want = reference.permute(xs, [(0, 1), (1, 2)])[rank]
    with ag.checked():
        for pairs in (zip((0, 1), (1, 2), strict=True), ((r, r + 1) for r in range(world - 1))):
            same(ag.permute(xs[rank], pairs), want, "the pieces")
    with pytest.raises(ag.errors.InputError, match="permute: 3 is not a"):
        ag.permute(xs[rank], 3)


ARRAYS = {
    "numpy": lambda pairs: np.array(pairs, np.int32),
    "tensor": torch.tensor,
    "list of arrays": lambda pairs: [np.array(pairs[0]), torch.tensor(pairs[1])],
    "numbers of numpy": lambda pairs: [(np.int64(a), torch.tensor(b)) for a, b in pairs],
}


@pytest.mark.ranks(3)
@pytest.mark.parametrize("kind", ARRAYS)
def test_pairs_may_be_arrays(rank, kind):
    """And those of one rank a list, in checked mode too."""
    xs, pairs = pieces([(2,), (1,), (0,)]), [(0, 1), (1, 2)]
    given = pairs if rank == 1 else ARRAYS[kind](pairs)
    want = reference.permute(xs, pairs)[rank]
    same(ag.permute(xs[rank], given), want, "the pieces")
    with ag.checked():
        same(ag.permute(xs[rank], given), want, "the pieces, checked")
    same(ag.permute(xs[rank], ARRAYS[kind](pairs)[:0]), torch.zeros_like(xs[rank]), "no pairs")


NO_PAIRS = {
    "a number of numpy": (np.array(3), "3 is not a (from, to) pair"),
    "a tensor of one number": (torch.tensor(3), "3 is not a (from, to) pair"),
    "a vector": (torch.tensor([0, 1]), "0 is not a (from, to) pair"),
    "three dimensions": (np.zeros((1, 2, 2), int), "from=[0, 0] is not a rank"),
    "three columns": (torch.zeros(1, 3).long(), "[0, 0, 0] is not a (from, to) pair"),
    "no whole numbers": (np.array([[0.0, 1.0]]), "from=0.0 is not a rank"),
}


@pytest.mark.ranks(3)
@pytest.mark.parametrize("kind", NO_PAIRS)
def test_arrays_that_are_no_pairs_are_refused(kind):
    pairs, words = NO_PAIRS[kind]
    for where in (contextlib.nullcontext(), ag.checked()):
        with where:
            raises_everywhere(
                (InputError, GroupError), lambda: ag.permute(torch.ones(2), pairs), words
            )


@pytest.mark.ranks(3)
@pytest.mark.parametrize("one", [np.int64(1), torch.tensor(1)])
def test_an_offset_is_any_whole_number(rank, world, one):
    assert ag.shift(torch.tensor([float(rank)]), one).tolist() == [(rank - 1) % world]
