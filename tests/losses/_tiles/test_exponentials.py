"""exp and logsumexp: torch's values, also far below the highest score."""

import math

import pytest
import torch

from allgrad.losses._tiles.exponentials import exp_, logsumexp
from exactness import leaf, random


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exp_is_near_torchs_at_every_size(dtype):
    x = torch.cat([-torch.logspace(-8, 2, 200, dtype=dtype), torch.tensor([0.0, -math.inf, -1e30])])
    info, want = torch.finfo(dtype), x.to(torch.float64).exp()
    near = 4 * info.eps * (want * x.abs().clamp(min=1, max=1e3) + info.smallest_normal)
    assert ((exp_(x.clone()) - want).abs() <= near).all()
    assert exp_(torch.zeros(2, dtype=dtype)).tolist() == [1, 1]


@pytest.mark.parametrize("dim", [0, 1])
def test_logsumexp_and_two_derivatives(dim):
    for factor, added in ((1, 0.0), (300, 0.0), (1, -1e30)):
        x = leaf(random((5, 4), 1))
        value = factor * x + added * torch.eye(5, 4)
        got, want = logsumexp(value, dim), value.logsumexp(dim)
        torch.testing.assert_close(got, want, rtol=1e-14, atol=1e-14)
        first = [torch.autograd.grad(y.sin().sum(), x, create_graph=True)[0] for y in (got, want)]
        second = [torch.autograd.grad(g.sin().sum(), x, retain_graph=True)[0] for g in first]
        torch.testing.assert_close(*first, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(*second, rtol=1e-9, atol=1e-9)


def test_logsumexp_of_nothing():
    x = leaf(torch.full((2, 3), -math.inf, dtype=torch.float64))
    value = logsumexp(x, 1)
    assert value.tolist() == [-math.inf, -math.inf]
    assert not torch.autograd.grad(value, x, torch.ones(2, dtype=torch.float64))[0].any()
    assert logsumexp(torch.zeros(2, 0), 1).tolist() == [-math.inf, -math.inf]
