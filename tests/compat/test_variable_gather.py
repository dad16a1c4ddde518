"""The gather of unequal pieces under its usual names: programs run, and gradients are exact."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import reference
from allgrad.compat.variable_gather import (
    AllGather,
    all_gather,
    all_gather_variable_dim,
    pad_dim_to,
)
from allgrad.errors import InputError, PieceMismatch, SizesError, TensorError
from allgrad.testing import run_ranks
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
)
from places import on
from refusals import raises_everywhere

COMPAT = "allgrad.compat.variable_gather"

# Programs for the originals, as their repositories call them; only the import line changes. Their
# own modules are not installed here: what they give was measured, and is written below.
PROGRAMS = {
    "gigagan_pytorch.distributed": """
from gigagan_pytorch.distributed import all_gather

def program(images, texts):
    images, batch_sizes = all_gather(images, 0, None)
    texts, _ = all_gather(texts, 0, batch_sizes)
    return images, texts
""",
    "x_clip.distributed": """
from x_clip.distributed import all_gather

def program(images, texts):
    images, sizes = all_gather(images.permute(1, 2, 0), 2, None)
    texts, _ = all_gather(texts.permute(1, 2, 0), 2, sizes)
    return images.permute(2, 0, 1), texts.permute(2, 0, 1)
""",
    "st_moe_pytorch.distributed": """
from st_moe_pytorch.distributed import AllGather

gather = AllGather()

def program(images, texts):
    images, batch_sizes = gather(images)
    texts, _ = gather(texts, sizes = batch_sizes)
    return images, texts
""",
    "soft_moe_pytorch.distributed": """
from soft_moe_pytorch.distributed import all_gather_variable_dim

def program(images, texts):
    images, batch_sizes = all_gather_variable_dim(images, dim = 0)
    texts, _ = all_gather_variable_dim(texts, dim = 0, sizes = batch_sizes)
    return images, texts
""",
}


def program(original):
    space = {}
    exec(PROGRAMS[original].replace(original, COMPAT), space)
    return space["program"]


def run_program(group, original, kind):
    rank, world = place(group)
    made = [[random((n, 3, 2), 10 * r + i) for i in (0, 1)] for r, n in enumerate(SIZES[kind])]
    leaves = [[leaf(x) for x in pair] for pair in made[:world]]
    wanted = [torch.cat([pair[i] for pair in leaves]) for i in (0, 1)]
    everyone = sum(loss(y, r + 7 * i) for r in range(world) for i, y in enumerate(wanted))
    flat = [x for pair in leaves for x in pair]
    first_wanted = grads(everyone, flat, graph=True)
    second_wanted = grads(sum(loss(g, 50 + i) for i, g in enumerate(first_wanted)), flat)

    xs = [leaf(x) for x in made[rank]]
    got = program(original)(*xs)
    for y, want in zip(got, wanted, strict=True):
        same(y.detach(), want.detach(), "the value")
    first = grads(sum(loss(y, rank + 7 * i) for i, y in enumerate(got)), xs, graph=True)
    second = grads(sum(loss(g, 50 + 2 * rank + i) for i, g in enumerate(first)), xs)
    for i in (0, 1):
        same(first[i].detach(), first_wanted[2 * rank + i].detach(), "the first derivative")
        same(second[i], second_wanted[2 * rank + i], "the second derivative")


@pytest.mark.one_in(4)
@pytest.mark.parametrize("where", ["no world", "1 rank", "3 ranks"])
@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("original", PROGRAMS)
def test_program_is_exact_with_its_import_line_changed(where, kind, original):
    on(where, run_program, original, kind)


def weighed_gradient(**options):
    """Rank r counts everybody's rows r + 1 times."""
    rank = dist.get_rank()
    x = torch.ones((2, 1, 3)[rank], 1, dtype=torch.float64, requires_grad=True)
    y, _ = all_gather(x, 0, None, **options)
    ((rank + 1) * y.sum()).backward()
    return x.grad.flatten().tolist()


def test_exact_where_the_originals_keep_the_own_part():
    """Measured on the original's code, and kept by ``grad="same"``: what only the own loss gives."""
    theirs = [[1.0, 1.0], [2.0], [3.0, 3.0, 3.0]]
    assert run_ranks(weighed_gradient, 3) == [[6.0, 6.0], [6.0], [6.0, 6.0, 6.0]]
    assert run_ranks(lambda: weighed_gradient(grad="same"), 3) == theirs


def keep_own_part(group, kind):
    _, world = place(group)
    for dim in (0, 1, -1):
        check_exact(
            lambda x, dim=dim: all_gather(x, dim, None, group=group, grad="same")[0],
            lambda xs, dim=dim: reference.all_gather(xs, dim),
            pieces(ragged_shapes(world, kind, dim % 3)),
            group=group,
            first="once",
        )


@pytest.mark.parametrize("kind", ["ragged", "empty"])
@pytest.mark.parametrize("where", ["3 ranks", "ranks 1 and 3 of 4"])
def test_own_part_is_exact_for_a_loss_that_counts_once(where, kind):
    on(where, keep_own_part, kind)


def gather_any_dim(group, kind):
    _, world = place(group)
    for dim in (0, 1, 2, -1, -3):
        for layout in ("contiguous", "transposed"):
            check_exact(
                lambda x, dim=dim: all_gather(x, dim, group=group)[0],
                lambda xs, dim=dim: reference.all_gather(xs, dim),
                pieces(ragged_shapes(world, kind, dim % 3)),
                group=group,
                layout=layout,
            )


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("where", ["3 ranks", "ranks 1 and 3 of 4", "axis of a 2 x 2 mesh"])
def test_any_dim_and_any_group_is_exact(where, kind):
    on(where, gather_any_dim, kind)


@pytest.mark.ranks(3)
def test_sizes_are_a_tensor_that_the_next_call_takes(rank):
    x = torch.zeros(rank + 1, 2)
    y, sizes = all_gather(x)
    assert y.shape == (6, 2)
    assert sizes.dtype == torch.int64
    assert sizes.tolist() == [1, 2, 3]
    again, same_sizes = all_gather(x, 0, sizes)
    assert same_sizes is sizes
    assert torch.equal(again, y)
    for given in ([1, 2, 3], (1, 2, 3), torch.tensor([1, 2, 3], dtype=torch.int32)):
        again, told = all_gather_variable_dim(x, sizes=given)
        assert torch.equal(again, y)
        assert told.tolist() == [1, 2, 3]


@pytest.mark.ranks(3)
def test_no_padding_travels(rank, monkeypatch):
    """One rank holds a thousand rows, the others one: the original sends 3000 rows, here 1002."""
    from allgrad._wire import primitives as wire

    counts = []
    gather = wire.all_gather
    monkeypatch.setattr(
        wire, "all_gather", lambda g, x, c: counts.append(list(c)) or gather(g, x, c)
    )
    y, _ = all_gather(torch.zeros(1000 if rank == 1 else 1, 4))
    assert y.shape == (1002, 4)
    assert counts[1:] == [[1, 1000, 1]]  # the first are the rows of the size exchange


def test_without_a_process_group():
    t = torch.ones(2, 3, requires_grad=True)
    for y, sizes in (all_gather(t, 0, None), all_gather_variable_dim(t), AllGather(dim=1)(t)):
        assert y is t
        assert sizes is None
    y, sizes = all_gather(t, grad="none")
    assert not y.requires_grad
    assert sizes is None


@pytest.mark.ranks(1)
def test_process_group_of_one():
    t = torch.ones(2, 3)
    y, sizes = all_gather(t)
    assert y is t
    assert sizes is None
    y, sizes = all_gather_variable_dim(t)
    assert torch.equal(y, t)
    assert sizes.tolist() == [2]


@pytest.mark.ranks(3)
def test_gradient_on_every_rank_or_on_none(rank):
    x = torch.zeros(2, requires_grad=rank == 1)
    assert all_gather(x)[0].requires_grad
    assert all_gather_variable_dim(x)[0].requires_grad  # the original's never does
    assert not all_gather_variable_dim(x, grad="none")[0].requires_grad
    assert not AllGather(grad="none")(x)[0].requires_grad


def test_module_can_sit_in_a_model():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), AllGather(dim=0))
    seen = []
    model.apply(lambda module: seen.append(type(module).__name__))
    assert seen == ["Linear", "AllGather", "Sequential"]
    assert not AllGather().state_dict()


def test_padding_goes_after_the_end():
    t = torch.arange(4.0).view(2, 2).requires_grad_()
    assert pad_dim_to(t, 3).tolist() == [[0.0, 1.0], [2.0, 3.0], [0.0, 0.0]]
    assert pad_dim_to(t, 3, -1).tolist() == [[0.0, 1.0, 0.0], [2.0, 3.0, 0.0]]
    assert torch.equal(pad_dim_to(t, 4, dim=1), torch.nn.functional.pad(t, (0, 2)))
    assert pad_dim_to(torch.tensor([True]), 2).tolist() == [True, False]
    assert pad_dim_to(t, 2).tolist() == t.tolist()
    weights = torch.arange(6.0).view(3, 2)
    (pad_dim_to(t, 3) * weights).sum().backward()
    assert t.grad.tolist() == [[0.0, 1.0], [2.0, 3.0]]


def test_padding_never_cuts():
    with pytest.raises(InputError, match="length=2, but dim 0 of shape"):
        pad_dim_to(torch.zeros(3), 2)
    with pytest.raises(InputError, match="dim=1 is out of range"):
        pad_dim_to(torch.zeros(3), 4, 1)


@pytest.mark.ranks(3)
def test_bad_input_on_one_rank_raises_on_all(rank):
    wide = torch.zeros(2, 4 if rank == 2 else 8)
    raises_everywhere(PieceMismatch, lambda: all_gather(wide), "rank 2: (2, 4)", "differs in dim 1")
    raises_everywhere(
        InputError,
        lambda: all_gather(torch.zeros(2), 1 if rank == 0 else 0),
        "dim=1 is out of range",
    )
    raises_everywhere(TensorError, lambda: all_gather(None if rank == 1 else wide), "NoneType")
    raises_everywhere(InputError, lambda: all_gather(torch.zeros(2), grad="own"), "grad='own'")


@pytest.mark.ranks(3)
def test_wrong_sizes_raise_instead_of_cutting_or_padding(rank):
    """The original cuts [0 1 2] to [0 1] on every rank, or pads it with a zero, without a word."""
    x = torch.arange(3.0)
    for sizes in (torch.tensor([2, 2, 2]), [4, 4, 4]):
        raises_everywhere(SizesError, lambda sizes=sizes: all_gather(x, 0, sizes), "it holds 3")
    raises_everywhere(SizesError, lambda: all_gather(x, 0, torch.tensor([3, 3])), "2 entries")
    raises_everywhere(SizesError, lambda: all_gather(x, 0, torch.tensor(3)), "1 entries")
    raises_everywhere(SizesError, lambda: all_gather(x, 0, torch.full((3,), 3.0)), "whole numbers")


def test_unknown_gradient():
    for call in (lambda: all_gather(torch.zeros(1), grad="own"), lambda: AllGather(grad="own")):
        with pytest.raises(InputError, match="grad='own'"):
            call()
