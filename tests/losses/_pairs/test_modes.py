"""Losses under torch.func, in forward mode and around compiled functions."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, jvp, vjp

from allgrad.errors import ModeError
from allgrad.losses import clip_loss, multiple_negatives_loss, siglip_loss
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


REFUSED = {
    "jvp of grad": lambda f, xs, ts: jvp(grad(f), xs, ts),
    "grad of jvp": lambda f, xs, ts: grad(lambda *ys: jvp(f, ys, ts)[1])(*xs),
    "jvp of jvp": lambda f, xs, ts: jvp(lambda *ys: jvp(f, ys, ts)[1], xs, ts),
    "hessian": lambda f, xs, _: torch.func.hessian(f)(*xs),
    "jacfwd": lambda f, xs, _: torch.func.jacfwd(f)(*xs),
    "jacrev": lambda f, xs, _: torch.func.jacrev(f)(*xs),
    "jacrev of jacrev": lambda f, xs, _: torch.func.jacrev(torch.func.jacrev(f))(*xs),
    "vmap": lambda f, xs, _: torch.vmap(f)(*(x.expand(2, *x.shape) for x in xs)),
    "vmap of grad": lambda f, xs, _: torch.vmap(grad(f))(*(x.expand(2, *x.shape) for x in xs)),
}


@pytest.mark.parametrize("mode", REFUSED)
def test_what_is_not_exact_is_refused(mode):
    for name in LOSSES:
        loss, _, given, _ = calls(name, 1, 0)
        tangents = tuple(torch.ones_like(x) for x in given)
        with pytest.raises(ModeError, match=f"^{LOSSES[name][0].__name__}: "):
            REFUSED[mode](loss, tuple(given), tangents)


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
