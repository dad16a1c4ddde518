"""Losses under torch.func, in forward mode and in batches, nested, against the formula in one process."""

from functools import partial
from itertools import product

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, jacfwd, jacrev, jvp, vjp

import allgrad as ag
from allgrad.errors import InputError, ModeError
from allgrad.losses import clip_loss, multiple_negatives_loss, siglip_loss
from exactness import random
from losses.formulas import formula_of_all, leaves_of_all, pieces
from losses.pairs import LOSSES, NEGATIVES, PAIRS, batch

TIGHT = {"rtol": 1e-10, "atol": 1e-12}


def calls(name, world, rank):
    """The loss on this rank, the formula, and the arguments of both without graphs."""
    loss, formula, options = LOSSES[name]
    counts = PAIRS["ragged"][:world]
    given, whole = (
        [x.detach() for x in batch(name, counts, r)]
        for r in ((rank, None) if world > 1 else (None,) * 2)
    )
    return lambda *xs: loss(*xs, **options), lambda *xs: formula(*xs, **options), given, whole


@pytest.mark.ranks(1, 3)
def test_func_grad_and_vjp(rank, world):
    counts = PAIRS["ragged"][:world]
    for name in LOSSES:
        loss, formula, given, whole = calls(name, world, rank)
        want = grad(formula, (0, 1))(*whole)
        _, pull = vjp(loss, *given)
        one = torch.ones((), dtype=torch.float64)
        for got in (grad(loss, (0, 1))(*given), pull(one)[:2]):
            for x, y in zip(got, want, strict=True):
                torch.testing.assert_close(x, world * y.split(list(counts))[rank], **TIGHT)
        alone = grad(loss, 2)(*given)
        assert alone.shape == ()


@pytest.mark.ranks(1, 3)
def test_forward_mode(rank, world):
    for name in LOSSES:
        loss, formula, given, whole = calls(name, world, rank)
        changes = [
            torch.cos(torch.arange(1.0, x.numel() + 1).double()).view(x.shape) for x in whole
        ]
        want = jvp(formula, tuple(whole), tuple(changes))[1]
        split = [list(PAIRS["ragged"][:world])] * 2 + [None, list(NEGATIVES[:world])]
        own = [
            x if not x.dim() else x.split(sizes)[rank]
            for x, sizes in zip(changes, split, strict=False)
        ]
        torch.testing.assert_close(jvp(loss, tuple(given), tuple(own))[1], want, **TIGHT)


@pytest.mark.ranks(3)
def test_rank_without_tangent_takes_part(rank, world):
    loss, formula, given, whole = calls("clip", world, rank)
    changed = torch.zeros_like(whole[0])
    changed[: PAIRS["ragged"][0]] = 1.0
    want = jvp(lambda x: formula(x, *whole[1:]), (whole[0],), (changed,))[1]
    with forward_ad.dual_level():
        if rank == 0:
            given[0] = forward_ad.make_dual(given[0], torch.ones_like(given[0]))
        got = forward_ad.unpack_dual(loss(*given)).tangent
    torch.testing.assert_close(got, want, **TIGHT)


def test_func_grad_of_grad():
    for name in LOSSES:
        loss, formula, given, _ = calls(name, 1, 0)
        found = []
        for function in (loss, formula):
            norm = lambda *xs, f=function: sum(g.square().sum() for g in grad(f, (0, 1, 2))(*xs))  # noqa: E731
            found.append(grad(norm, (0, 1, 2))(*given))
        for x, y in zip(*found, strict=True):
            torch.testing.assert_close(x, y, **TIGHT)


def argnums(xs):
    return tuple(range(len(xs)))


def one(xs):
    return torch.ones((), dtype=xs[0].dtype)


def duals_around_autograd(f, xs, ts):
    with forward_ad.dual_level():
        duals = [
            forward_ad.make_dual(x.detach().clone().requires_grad_(), t)
            for x, t in zip(xs, ts, strict=True)
        ]
        found = torch.autograd.grad(f(*duals), duals)
        return tuple(forward_ad.unpack_dual(x).tangent for x in found)


# Each gives what rank r gets, of its arguments and of directions. The first entry tells whether the sum of
# all ranks' losses is differentiated in reverse mode, which counts W times.
NESTINGS = {
    "jvp of grad": (1, lambda f, xs, ts: jvp(grad(f, argnums(xs)), xs, ts)[1]),
    "grad of jvp": (1, lambda f, xs, ts: grad(lambda *ys: jvp(f, ys, ts)[1], argnums(xs))(*xs)),
    "grad of jvp by the direction": (
        1,
        lambda f, xs, ts: grad(lambda *us: jvp(f, xs, us)[1].square(), argnums(ts))(*ts),
    ),
    "vjp of vjp": (1, lambda f, xs, ts: vjp(lambda *ys: vjp(f, *ys)[1](one(xs)), *xs)[1](ts)),
    "duals around autograd": (1, duals_around_autograd),
}


def directions(xs):
    return tuple(
        torch.cos(torch.arange(1.0, x.numel() + 1).double()).to(x.dtype).view(x.shape) for x in xs
    )


def joined_and_own(name, kind, rank, world):
    """Joined arguments and directions, with numbers of each rank's own, and a function that takes this rank's."""
    counts = PAIRS[kind][:world]
    leaves = tuple(x.detach() for x in leaves_of_all(name, counts))
    return leaves, directions(leaves), lambda xs: tuple(pieces(name, counts, xs, rank))


def functions(name, kind, world):
    """The loss on a rank, and the formula of joined arguments."""
    loss, _, options = LOSSES[name]
    counts = PAIRS[kind][:world]
    return partial(loss, **options), lambda *xs: formula_of_all(name, counts, xs)


@pytest.mark.parametrize("nesting", NESTINGS)
@pytest.mark.ranks(1, 2, 3)
def test_nestings(rank, world, nesting):
    passes, function = NESTINGS[nesting]
    for name, kind in product(LOSSES, ("ragged", "empty")):
        loss, formula = functions(name, kind, world)
        leaves, changes, own = joined_and_own(name, kind, rank, world)
        want = function(formula, leaves, changes)
        got = function(loss, own(leaves), own(changes))
        for x, y in zip(got, own(want), strict=True):
            torch.testing.assert_close(x, world**passes * y, **TIGHT)


@pytest.mark.ranks(3)
def test_a_rank_without_tangent_takes_part_in_the_change_of_the_gradient(rank, world):
    for name in LOSSES:
        loss, formula = functions(name, "ragged", world)
        leaves, changes, own = joined_and_own(name, "ragged", rank, world)
        counts = PAIRS["ragged"][:world]
        moving = torch.zeros_like(leaves[0])
        moving[: counts[0]] = changes[0][: counts[0]]
        others = tuple(torch.zeros_like(x) for x in leaves[1:])
        want = jvp(grad(formula, (0, 1, 2)), leaves, (moving, *others))[1]
        xs = list(own(leaves))
        with forward_ad.dual_level():
            if rank == 0:
                xs[0] = forward_ad.make_dual(xs[0], own(changes)[0])
            got = [forward_ad.unpack_dual(x).tangent for x in grad(loss, (0, 1, 2))(*xs)]
        for x, y in zip(got, pieces(name, counts, want, rank), strict=True):
            torch.testing.assert_close(x, world * y, **TIGHT)


@pytest.mark.ranks(2, 3)
def test_forward_and_reverse_mode_are_adjoint_where_ranks_weigh_a_summed_loss(rank, world):
    """The products of J v with u and of v with the transposed J u, summed over ranks, are one number."""
    for name in LOSSES:
        loss, _, options = LOSSES[name]
        leaves, changes, own = joined_and_own(name, "ragged", rank, world)
        xs, v, u = own(leaves), own(changes), own(tuple(x.sin() for x in changes))
        weight = torch.tensor(rank + 1.0, dtype=torch.float64)
        turn = torch.tensor(0.5 - rank, dtype=torch.float64)

        def gradients(weight, *ys):
            return vjp(lambda *zs: loss(*zs, grad_reduction="sum", **options), *ys)[1](weight)  # noqa: B023

        along = jvp(gradients, (weight, *xs), (turn, *v))[1]
        by_weight, *back = vjp(gradients, weight, *xs)[1](u)
        pairs = [*zip(along, u, strict=True)], [(by_weight, turn), *zip(back, v, strict=True)]
        sums = torch.stack([sum((a * b).sum() for a, b in both) for both in pairs])
        left, right = ag.all_reduce(sums, grad="none")
        torch.testing.assert_close(left, right, **TIGHT)
        assert left.abs() > 1e-3


@pytest.mark.ranks(1, 2)
def test_jacobians_and_hessian(rank, world):
    """Over ranks, element j of every rank's input moves at once."""
    for name in LOSSES:
        loss, formula_of_leaves = functions(name, "equal", world)
        leaves, _, own = joined_and_own(name, "equal", rank, world)
        counts = PAIRS["equal"][:world]
        q, *others = own(leaves)
        size = q.numel()
        of_rank = partial(lambda loss, others, q: loss(q, *others), loss, others)
        formula = partial(
            lambda formula, others, q: formula(q, *others), formula_of_leaves, leaves[1:]
        )
        gradient = torch.func.grad(formula)(leaves[0]).split(list(counts))[rank]
        torch.testing.assert_close(torch.func.jacrev(of_rank)(q), world * gradient, **TIGHT)
        units = torch.eye(size, dtype=q.dtype).repeat(1, world).view(size, *leaves[0].shape)
        columns = [jvp(formula, (leaves[0],), (unit,))[1] for unit in units]
        got = torch.func.jacfwd(of_rank)(q)
        torch.testing.assert_close(got, torch.stack(columns).view_as(q), **TIGHT)
        products = [jvp(grad(formula), (leaves[0],), (unit,))[1] for unit in units]
        want = torch.stack([x.split(list(counts))[rank] for x in products], -1)
        for hessian in (torch.func.hessian, lambda f: jacfwd(grad(f)), lambda f: jacrev(jacrev(f))):
            if hessian is torch.func.hessian or world == 1:
                got = hessian(of_rank)(q).reshape(*q.shape, size)
                torch.testing.assert_close(got, world * want, **TIGHT)


BATCHES = {
    "vmap": (0, lambda f, xs, _: (f(*xs),)),
    "vmap of grad": (1, lambda f, xs, _: grad(f, argnums(xs))(*xs)),
    "vmap of jvp": (0, lambda f, xs, ts: (jvp(f, xs, ts)[1],)),
    "vmap of jvp of grad": NESTINGS["jvp of grad"],
    "vmap of grad of jvp": NESTINGS["grad of jvp"],
    "vmap of vjp of vjp": NESTINGS["vjp of vjp"],
}


@pytest.mark.parametrize("mode", BATCHES)
@pytest.mark.ranks(1, 3)
def test_batches(rank, world, mode):
    """Entry b meets entry b of the other ranks. What rank 0 gives as keys has no batch."""
    passes, function = BATCHES[mode]
    for name, kind in product(LOSSES, ("ragged", "empty")):
        loss, formula = functions(name, kind, world)
        leaves, changes, own = joined_and_own(name, kind, rank, world)
        first = slice(PAIRS[kind][0])
        entries = [[x * (1 + b / 10) for x in leaves] for b in range(3)]
        for entry in entries:
            entry[1][first] = leaves[1][first]
        want = [function(formula, tuple(entry), changes) for entry in entries]
        ts = own(changes)
        xs = [torch.stack(x) for x in zip(*map(own, entries), strict=True)]
        dims = [0] * len(xs)
        if rank == 0:
            xs[1], dims[1] = own(leaves)[1], None
        got = torch.vmap(lambda *ys: function(loss, ys, ts), tuple(dims))(*xs)  # noqa: B023
        for b, one_of in enumerate(want):
            wanted = own(one_of) if len(one_of) > 1 else one_of
            for x, y in zip(got, wanted, strict=True):
                torch.testing.assert_close(x[b], world**passes * y, **TIGHT)


@pytest.mark.ranks(1, 2)
def test_batches_of_directions_in_backward(rank, world):
    """torch.vmap of torch.autograd.grad, with a graph of eager autograd that is kept."""
    for name, (loss, _, options) in LOSSES.items():
        xs = batch(name, PAIRS["ragged"][:world], rank)
        value = loss(*xs, **options)
        weights = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
        found = torch.vmap(lambda w: torch.autograd.grad(value, xs, w, retain_graph=True))(weights)  # noqa: B023
        once = torch.autograd.grad(value, xs)
        for x, y in zip(found, once, strict=True):
            torch.testing.assert_close(x, torch.stack([w * y for w in weights]), **TIGHT)


@pytest.mark.ranks(2)
def test_batch_sizes_are_compared(rank):
    """By losses of both kinds of messages; and torch.vmap on one rank only is seen."""
    x = random((2 + rank, 3, 4), rank)
    for loss in (clip_loss, multiple_negatives_loss):
        with pytest.raises(InputError, match=r"torch\.vmap"):
            torch.vmap(lambda q: loss(q, q, 2.0))(x)  # noqa: B023
        with pytest.raises(InputError):
            loss(x[0], x[0], 2.0) if rank else torch.vmap(lambda q: loss(q, q, 2.0))(x)  # noqa: B023
        assert torch.isfinite(loss(x[0], x[0], 2.0))


def test_a_batch_of_none_is_refused():
    with pytest.raises(ModeError, match="batch of size 0"):
        torch.vmap(lambda q: clip_loss(q, q, 2.0))(torch.ones(0, 3, 4))


REFUSED = {
    "jvp of jvp": lambda f, xs, ts: jvp(lambda *ys: jvp(f, ys, ts)[1], xs, ts),
    "jacfwd of jacfwd": lambda f, xs, _: jacfwd(jacfwd(f))(*xs),
    "grad of grad of grad": lambda f, xs, _: grad(square_of_grad(square_of_grad(f)))(*xs),
    "jvp of grad of grad": lambda f, xs, ts: jvp(square_of_grad(square_of_grad(f)), xs, ts),
    "grad of jvp of grad": lambda f, xs, ts: grad(
        lambda *ys: jvp(grad(f), ys, ts)[1].square().sum()
    )(*xs),
    "jacrev of hessian": lambda f, xs, _: jacrev(torch.func.hessian(f))(*xs),
}


def square_of_grad(f):
    return lambda *xs: grad(f)(*xs).square().sum()


@pytest.mark.parametrize("mode", REFUSED)
def test_what_is_not_exact_is_refused(mode):
    for name in LOSSES:
        loss, _, given, _ = calls(name, 1, 0)
        tangents = tuple(torch.ones_like(x) for x in given)
        with pytest.raises(ModeError, match=f"^{LOSSES[name][0].__name__}: "):
            REFUSED[mode](loss, tuple(given), tangents)


@pytest.mark.ranks(2)
def test_transforms_inside_a_lockstep_block_are_refused(rank):
    x = random((3, 4), rank)
    for loss in (clip_loss, siglip_loss, multiple_negatives_loss):
        with ag.lockstep(), pytest.raises(ModeError, match="lockstep"):
            grad(lambda q: loss(q, q, 2.0))(x)  # noqa: B023


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("loss", [clip_loss, siglip_loss, multiple_negatives_loss])
def test_batches_of_gradients_are_refused_before_anything_is_sent(world, loss):
    """Of torch's first vmap; the group can be used afterwards."""
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)

    def of(x):
        return loss(x, x, 2.0)

    if world > 1 or loss is not multiple_negatives_loss:  # without messages it is plain torch
        with pytest.raises(ModeError, match="one gradient of the loss at a time"):
            torch.autograd.functional.jacobian(of, x, vectorize=True)
        value = of(x)
        with pytest.raises(ModeError, match="one gradient of the loss at a time"):
            torch.autograd.grad(value, x, torch.ones(2, dtype=x.dtype), is_grads_batched=True)
    assert torch.isfinite(torch.autograd.grad(of(x), x)[0]).all()
