"""Recomputed functions: the derivatives of the plain function, in every mode, and little memory.

With few scores an eager backward uses what forward computed.
"""

import gc
import os
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from allgrad.errors import ModeError
from allgrad.losses._rows.recompute import (
    KEPT_SCORES,
    KEPT_SCORES_ON_DEVICES,
    Pulled,
    recomputed,
)
from exactness import leaf, random
from losses.kept_memory import largest_kept


def plain(x, w):
    return (x @ w.T).logsumexp(1).sin()


def again(x, w, scores=KEPT_SCORES + 1):
    return recomputed(plain, x, w, scores=scores)


def inputs():
    return leaf(random((3, 2), 1)), leaf(random((4, 2), 2))


COUNTS = pytest.mark.parametrize("scores", [KEPT_SCORES, KEPT_SCORES + 1])


@COUNTS
def test_derivatives_of_three_orders(scores):
    found = []
    for function in (plain, partial(again, scores=scores)):
        x, w = inputs()
        value = function(x, w).sum()
        for _ in range(3):
            (gradient,) = torch.autograd.grad(value, x, create_graph=True)
            found.append(gradient.detach())
            value = (gradient * w[:3]).sin().sum()
    for got, want in zip(found[:3], found[3:], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


@COUNTS
def test_backward_twice_and_under_checkpoint(scores):
    """Few scores are computed once for the first backward, and again for the second."""
    calls = []

    def counted(x, w):
        calls.append(1)
        return plain(x, w)

    x, w = inputs()
    want = torch.autograd.grad(plain(x, w).sum(), (x, w))
    value = recomputed(counted, x, w, scores=scores).sum()
    for number in (1, 2):
        got = torch.autograd.grad(value, (x, w), retain_graph=True)
        torch.testing.assert_close(got, want)
        assert len(calls) == number + (scores > KEPT_SCORES)
    inside = checkpoint(lambda: again(x, w, scores).sum(), use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(inside, (x, w)), want)


@COUNTS
def test_inputs_changed_in_place_raise_in_backward(scores):
    x, w = inputs()
    moved = 2 * x
    value = again(moved, w, scores).sum()
    moved.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


@COUNTS
def test_backward_of_what_depends_on_no_input(scores):
    x, w = inputs()
    value = recomputed(lambda x, w: w.detach().sum(1) + x.detach().sum(), x, w, scores=scores)
    for g in torch.autograd.grad(value.sum(), (x, w)):
        assert not g.any()


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_a_graph_that_is_dropped_is_freed():
    """Without a backward, or with one that has a graph of its own: exp saves its result."""
    x, w = leaf(random((512, 4), 1)), leaf(random((512, 4), 2))

    def step(create_graph):
        value = recomputed(lambda x, w: (x @ w.T).exp().sum(1), x, w, scores=512 * 512).sum()
        if create_graph:
            torch.autograd.grad(value, x, create_graph=True)

    for create_graph in (False, True):
        step(create_graph)
        before = resident()
        for _ in range(60):  # of 2 MiB
            step(create_graph)
        gc.collect()
        assert resident() - before < 40 << 20


def test_where_hooks_for_saved_tensors_are_forbidden():
    x, w = inputs()
    want = torch.autograd.grad(plain(x, w).sum(), (x, w))
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        got = torch.autograd.grad(again(x, w, 12).sum(), (x, w))
    torch.testing.assert_close(got, want)


MODES = {
    "grad": torch.func.grad,
    "grad of grad": lambda f: torch.func.grad(lambda x: torch.func.grad(f)(x).sin().sum()),
    "hessian": torch.func.hessian,
    "jacrev(jacrev)": lambda f: torch.func.jacrev(torch.func.jacrev(f)),
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (x.sin(),))[1],
    "vmap": lambda f: lambda x: torch.func.vmap(f)(torch.stack([x, 2 * x])),
}


@pytest.mark.parametrize("mode", MODES)
def test_func_transforms(mode):
    x, w = (t.detach() for t in inputs())
    got, want = (MODES[mode](lambda x, f=f: f(x, w).sum())(x) for f in (again, plain))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("mode", MODES)
def test_func_transforms_of_whole_numbers(mode):
    """Made inside of a transform, they are of no use once it has ended: they are inputs too."""
    x, w = (t.detach() for t in inputs())

    def chosen(at, x, none, w):
        assert none is None
        return plain(x, w).gather(0, at)

    def recomputing(x):
        return recomputed(chosen, torch.arange(3).flip(0) % 2, x, None, w, scores=6).sum()

    def directly(x):
        return chosen(torch.arange(3).flip(0) % 2, x, None, w).sum()

    got, want = MODES[mode](recomputing)(x), MODES[mode](directly)(x)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


def test_forward_mode_inside_forward_mode_is_refused():
    """Torch would leave out the derivative of the derivative without a word."""
    x, w = (t.detach() for t in inputs())

    def along(f):
        return lambda x: torch.func.jvp(f, (x,), (w[:3],))[1]

    for outer in (along, torch.func.jacfwd):
        with pytest.raises(ModeError, match="jvp of jvp"):
            outer(along(lambda x: again(x, w).sum()))(x)


def test_only_inputs_are_kept():
    x, w = leaf(random((64, 2), 1)), leaf(random((64, 2), 2))
    assert largest_kept(lambda: plain(x, w).sum(), (x, w), 1) >= 64 * 64
    for order in (1, 2):
        assert largest_kept(lambda: again(x, w).sum(), (x, w), order) <= 64 * 2
    assert largest_kept(lambda: again(x, w, 64 * 64).sum(), (x, w), 1) >= 64 * 64


@COUNTS
def test_an_input_without_gradient_gets_none(scores):
    x, w = inputs()
    again(x, w.detach(), scores).sum().backward()
    want, x.grad = x.grad, None
    plain(x, w).sum().backward()
    torch.testing.assert_close(want, x.grad)


@COUNTS
def test_eager_gradients_without_a_graph_are_those_of_once(scores):
    """Also a second time; all other derivatives are those of the function itself."""
    x, w = inputs()
    plain_first = torch.autograd.grad(plain(x, w).sum(), (x, w), create_graph=True)
    calls, pulls = [], []

    def once(needed, x, w):
        assert needed == (True, True)
        calls.append(torch.is_grad_enabled())

        def pull(by_result):
            pulls.append(by_result)
            return [torch.full_like(x, 2), torch.full_like(w, 3)]

        return Pulled(plain(x, w), pull)

    value = recomputed(plain, x, w, scores=scores, once=once).sum()
    for number in (1, 2):
        by_x, by_w = torch.autograd.grad(value, (x, w), retain_graph=True)
        assert by_x.eq(2).all()
        assert by_w.eq(3).all()
        assert len(pulls) == number
        assert calls == [False] * (number + (scores > KEPT_SCORES))
    first = torch.autograd.grad(value, (x, w), create_graph=True)
    torch.testing.assert_close(first, plain_first)
    second, want = (
        torch.autograd.grad(sum(g.square().sum() for g in gs), (x, w))
        for gs in (first, plain_first)
    )
    torch.testing.assert_close(second, want)
    assert len(pulls) == 2


@COUNTS
def test_where_once_gives_nothing_autograd_does(scores):
    x, w = inputs()
    value = recomputed(plain, x, w, scores=scores, once=lambda *_: None)
    torch.testing.assert_close(value, plain(x, w))
    found, want = (torch.autograd.grad(y.sum(), (x, w)) for y in (value, plain(x, w)))
    torch.testing.assert_close(found, want)


@pytest.mark.parametrize(
    "scores", [KEPT_SCORES + 1, KEPT_SCORES_ON_DEVICES, KEPT_SCORES_ON_DEVICES + 1]
)
def test_more_scores_are_kept_on_a_device(scores):
    """Of functions that keep little."""
    x, w = (torch.ones(n, 2, device="meta", requires_grad=True) for n in (3, 4))
    calls = []

    def counted(*given):
        calls.append(len(given))
        return Pulled(plain(*given[-2:]), lambda _: [x, w])

    value = recomputed(plain, x, w, scores=scores, once=counted)
    value.sum().backward()
    assert calls == [3] * (1 if scores <= KEPT_SCORES_ON_DEVICES else 2)
    calls.clear()
    recomputed(lambda *given: counted(*given).result, x, w, scores=scores).sum().backward()
    assert calls == [2, 2]
