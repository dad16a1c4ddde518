"""Recomputed functions: the derivatives of the plain function, in every mode, and little memory."""

import pytest
import torch

from allgrad.errors import ModeError
from allgrad.losses._rows.recompute import recomputed
from exactness import leaf, random
from losses.kept_memory import largest_kept


def plain(x, w):
    return (x @ w.T).logsumexp(1).sin()


def again(x, w):
    return recomputed(plain, x, w)


def inputs():
    return leaf(random((3, 2), 1)), leaf(random((4, 2), 2))


def test_derivatives_of_three_orders():
    found = []
    for function in (plain, again):
        x, w = inputs()
        value = function(x, w).sum()
        for _ in range(3):
            (gradient,) = torch.autograd.grad(value, x, create_graph=True)
            found.append(gradient.detach())
            value = (gradient * w[:3]).sin().sum()
    for got, want in zip(found[:3], found[3:], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


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
        return recomputed(chosen, torch.arange(3).flip(0) % 2, x, None, w).sum()

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


def test_an_input_without_gradient_gets_none():
    x, w = inputs()
    again(x, w.detach()).sum().backward()
    want, x.grad = x.grad, None
    plain(x, w).sum().backward()
    torch.testing.assert_close(want, x.grad)
