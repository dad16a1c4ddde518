"""Second derivatives of every loss on real ranks, against the formula in one process."""

from itertools import product

import pytest
import torch

from allgrad.errors import ModeError
from allgrad.losses._tiles import torch as torch_tiles
from losses.formulas import formula_of_all, leaves_of_all, pieces
from losses.pairs import LOSSES, PAIRS, SATURATED, batch, saturated

TIGHT = {"rtol": 1e-10, "atol": 1e-12}


def penalty(gradients, seed):
    """A function of the gradients that has another coefficient for each number."""
    generator = torch.Generator().manual_seed(seed)
    total = 0
    for g in gradients:
        each = torch.randn(g.shape, generator=generator, dtype=g.dtype)
        total = total + (each * g).sum() + (each * g**2).sum()
    return total


ASK = {
    "grad": torch.autograd.grad,
    "backward": lambda total, xs: total.backward() or [x.grad for x in xs],
    "backward of inputs": lambda total, xs: total.backward(inputs=xs) or [x.grad for x in xs],
}


def check(rank, world, name, kind, ask="grad", grad_reduction="mean", **more):
    loss, _, options = LOSSES[name]
    counts = PAIRS[kind][:world]
    whole = leaves_of_all(name, counts)
    factor = world if grad_reduction == "mean" else 1
    value = factor * formula_of_all(name, counts, whole)
    first = torch.autograd.grad(value, whole, create_graph=True)
    total = value + sum(penalty(pieces(name, counts, first, r), r) for r in range(world))
    want = pieces(name, counts, torch.autograd.grad(total, whole), rank)

    given = batch(name, counts, rank)
    value = loss(*given, grad_reduction=grad_reduction, **options, **more)
    first = torch.autograd.grad(value, given, create_graph=True)
    got = ASK[ask](value + penalty(first, rank), given)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, **TIGHT)


@pytest.mark.ranks(1, 2, 3, 4)
def test_gradient_of_a_penalty_on_the_gradient(rank, world):
    for name in LOSSES:
        check(rank, world, name, "ragged")
        check(rank, world, name, "empty", grad_reduction="sum")


@pytest.mark.ranks(2)
def test_every_way_of_asking(rank, world):
    for name in LOSSES:
        for ask in ASK:
            check(rank, world, name, "ragged", ask)


@pytest.mark.ranks(3)
def test_in_tiles_and_around_a_ring(rank, world):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_tiles, "CPU_TILE", (2, 3))
        patch.setitem(torch_tiles.KEPT_SCORES, "cpu", 0)
        for name in LOSSES:
            check(rank, world, name, "ragged")
            check(rank, world, name, "ragged", ring=True)


@pytest.mark.ranks(2)
def test_ranks_that_weigh_the_loss_differently(rank, world):
    """The gradient depends on the weights, and has a derivative by them."""
    counts = PAIRS["ragged"][:world]
    for name, (loss, _, options) in LOSSES.items():
        whole = leaves_of_all(name, counts)
        weights = torch.tensor([2.0, 5.0], dtype=torch.float64, requires_grad=True)
        value = weights.sum() * formula_of_all(name, counts, whole)
        first = torch.autograd.grad(value, whole, create_graph=True)
        total = sum(penalty(pieces(name, counts, first, r), r) for r in range(world))
        *want, by_weight = torch.autograd.grad(total, [*whole, weights])

        given = batch(name, counts, rank)
        weight = weights.detach()[rank].requires_grad_()
        value = weight * loss(*given, **options)
        first = torch.autograd.grad(value, given, create_graph=True)
        *got, own = torch.autograd.grad(penalty(first, rank), [*given, weight])
        torch.testing.assert_close(own, by_weight[rank], **TIGHT)
        for x, y in zip(got, pieces(name, counts, want, rank), strict=True):
            torch.testing.assert_close(x, y, **TIGHT)


@pytest.mark.ranks(1, 3)
def test_second_derivatives_keep_their_digits(rank, world):
    """In float32, where pairs are far above all others, and where another score is far above the pair."""
    counts = (7, 2, 4)[:world]
    lift = 2.0**30  # against underflow
    for (loss, formula, numbers), turned in product(SATURATED.values(), (False, True)):
        image, text = saturated(counts, torch.float32)
        joined = image, text.roll(1, 0) if turned else text
        for reduction, factor in (("mean", world), ("sum", 1)):
            xs = [x.double().requires_grad_() for x in joined]
            value = factor * lift * formula(*xs, *numbers)
            first = torch.autograd.grad(value, xs, create_graph=True)
            wanted = torch.autograd.grad(sum(g.square().sum() for g in first), xs)

            xs = [x.split(list(counts))[rank].clone().requires_grad_() for x in joined]
            value = lift * loss(*xs, *numbers, grad_reduction=reduction)
            first = torch.autograd.grad(value, xs, create_graph=True)
            got = torch.autograd.grad(sum(g.square().sum() for g in first), xs)
            near = 1e-5 if turned else 2e-4  # of which the formula in float64 has a part
            for x, whole in zip(got, wanted, strict=True):
                error = (x.double() - whole.split(list(counts))[rank]).norm() / whole.norm()
                assert error <= near, (formula, turned, reduction, error)


# Autograd prunes the nodes that do not lead to the tensors asked for; a pruned refusal would be silent.
@pytest.mark.parametrize("ask", ASK)
@pytest.mark.ranks(2)
def test_third_derivative_is_refused(rank, world, ask):
    for name in ("clip", "siglip", "info_nce, negatives"):
        loss, _, options = LOSSES[name]
        for number, x in enumerate(batch(name, PAIRS["ragged"][:world], rank)):
            given = batch(name, PAIRS["ragged"][:world], rank)
            w = torch.ones((), dtype=torch.float64, requires_grad=True)  # upstream of one input
            given[number] = x.detach() * w
            value = loss(*given, **options)
            (first,) = torch.autograd.grad(value, w, create_graph=True)
            (second,) = torch.autograd.grad(first, w, create_graph=True)
            with pytest.raises(ModeError, match=f"{loss.__name__}: .*third derivatives"):
                ASK[ask](value + second, [w])
