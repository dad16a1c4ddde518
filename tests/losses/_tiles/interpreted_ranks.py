"""The losses of several ranks on the Triton kernels, in Triton's interpreter, against the formula.

``test_interpreted.py`` runs this file in a process of its own. What chooses a pass for a device chooses
it here, for tensors on the host.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

from functools import partial

import pytest
import torch
from torch.autograd import forward_ad

import allgrad as ag
from allgrad.losses._pairs import first_order, fused_pass
from allgrad.losses._tiles import torch as torch_tiles
from exactness import leaf, random
from losses._tiles.interpreted_kernels import interpret
from losses.pairs import LOSSES, PAIRS, batch

COUNTS = {"ragged": PAIRS["ragged"], "empty": PAIRS["empty"], "first empty": (0, 4, 2, 3)}
KEPT = {"scores kept": 2**28, "scores in tiles": 0}


def as_on_a_device(patch, kept):
    interpret(patch)
    for module in (first_order, fused_pass, torch_tiles):
        patch.setattr(module, "has_kernels", lambda x: x.dtype in torch_tiles.TRITON_DTYPES)
    patch.setattr(fused_pass, "_is_large", lambda _: False)
    patch.setattr(first_order, "is_small", lambda *_: False)
    patch.setattr(first_order, "has_panels", lambda *_, **__: False)
    patch.setitem(torch_tiles.KEPT_SCORES, "cpu", kept)


NEAR = {torch.float32: 2e-5, torch.float16: 3e-3}


def near(got, want, dtype=torch.float32):
    torch.testing.assert_close(got.double(), want, rtol=NEAR[dtype], atol=NEAR[dtype])


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("kind", COUNTS)
@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.ranks(1, 2, 3)
def test_ranks_of_which_one_is_empty(rank, world, monkeypatch, dtype, kept, kind, name):
    """Also equal and ragged ones: the value on every rank, and all gradients."""
    as_on_a_device(monkeypatch, KEPT[kept])
    loss, formula, options = LOSSES[name]
    counts = COUNTS[kind][:world]
    counts = counts if sum(counts) else (1,)
    # Both of the same numbers; a scale is float32 beside any features.
    whole = [x if not x.dim() else leaf(x.to(dtype).double()) for x in batch(name, counts)]
    want = formula(*whole, **options)
    by_whole = torch.autograd.grad(want, whole)
    for reduction, factor in (("mean", world), ("sum", 1)):
        own = batch(name, counts, rank)
        given = [leaf(x.to(dtype if x.dim() else torch.float32)) for x in own]
        value = loss(*given, grad_reduction=reduction, **options)
        near(value.detach(), want.detach(), dtype)
        value.backward()
        for x, y in zip(given[:2], by_whole[:2], strict=True):
            near(x.grad, factor * y.split(list(counts))[rank], dtype)
        numbers = torch.stack([x.grad for x in given if not x.dim()])
        exact = torch.stack([y for x, y in zip(whole, by_whole, strict=True) if not x.dim()])
        near(ag.all_reduce(numbers, grad="none"), factor * exact, dtype)


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("kind", ["ragged", "empty"])
@pytest.mark.ranks(1, 2)
def test_ranks_that_need_no_gradient_go_back_to_what_else_does(
    rank, world, monkeypatch, kept, kind, name
):
    as_on_a_device(monkeypatch, KEPT[kept])
    loss, formula, options = LOSSES[name]
    counts = COUNTS[kind][:world]
    given = [x.detach().float() for x in batch(name, counts, rank)]
    other = torch.ones((), requires_grad=True)
    value = loss(*given, **options)
    near(value.detach(), formula(*(x.detach() for x in batch(name, counts)), **options))
    (value + other).backward()
    assert other.grad == 1


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.ranks(1, 2)
def test_dual_numbers_around_the_gradient(rank, world, monkeypatch, kept, name):
    """And the change of the gradient by torch.func.jvp, which is the same."""
    as_on_a_device(monkeypatch, KEPT[kept])
    loss, _, options = LOSSES[name]
    given = [x.detach().float() for x in batch(name, PAIRS["ragged"][:world], rank)]
    change = random(given[0].shape, 5 + rank, torch.float32)
    gradients = torch.func.grad(partial(loss, **options), tuple(range(len(given))))
    want = torch.func.jvp(lambda q: gradients(q, *given[1:]), (given[0],), (change,))[1]
    with forward_ad.dual_level():
        found = gradients(forward_ad.make_dual(given[0], change), *given[1:])
        got = [forward_ad.unpack_dual(x).tangent for x in found]
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.ranks(1, 2)
def test_a_loss_without_gradients_changed_in_place(rank, world, monkeypatch, name):
    as_on_a_device(monkeypatch, 2**28)
    loss, _, options = LOSSES[name]
    given = [x.detach().float() for x in batch(name, PAIRS["ragged"][:world], rank)]
    value = loss(*given, **options)
    want = value.detach() / 2
    value /= 2
    assert torch.equal(value, want)
