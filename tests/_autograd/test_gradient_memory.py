"""Gradients and results have memory of their own, also where a call hands a tensor through."""

import pytest
import torch
from torch.autograd import forward_ad

import allgrad as ag


def plain(x):
    return ag.all_reduce(x, grad="same")


def in_nest(x):
    return ag.all_reduce({"a": x, "b": torch.ones(1)}, grad="same")["a"]


def pending(x):
    return ag.all_reduce(x, grad="same", async_op=True).wait()


CALLS = {"plain": plain, "in a nest": in_nest, "async": pending}


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", CALLS)
def test_gradients_share_no_memory(name):
    call, given = CALLS[name], torch.ones(2)
    p, q, r = (torch.ones(2, requires_grad=True) for _ in range(3))
    for _ in range(2):  # two micro-batches, whose gradients are added up in place
        (call(p) + 2 * call(q) + call(r)).backward(given)
    assert given.tolist() == [1, 1]
    assert [x.grad.tolist() for x in (p, q, r)] == [[2, 2], [4, 4], [2, 2]]
    p.grad.mul_(0.5)
    assert r.grad.tolist() == [2, 2]


@pytest.mark.ranks(2)
def test_gradients_share_no_memory_in_lockstep_and_beside_dual_numbers():
    given = torch.ones(2)
    tied, dual = (torch.ones(2, requires_grad=True) for _ in range(2))
    with ag.lockstep() as step:
        y = plain(tied)
    step.tie(y).backward(given)
    with forward_ad.dual_level():
        plain(dual).backward(given)
    for x in (tied, dual):
        x.grad.add_(1)
        assert x.grad.tolist() == [2, 2]
    assert given.tolist() == [1, 1]


@pytest.mark.ranks(2)
def test_what_an_async_share_gave_is_not_its_input():
    x = torch.ones(2, requires_grad=True)
    y = ag.share(x, async_op=True).wait()
    y.mul_(3)
    y.sum().backward()
    assert x.tolist() == [1, 1]
    assert x.grad.tolist() == [6, 6]


@pytest.mark.ranks(2)
def test_share_of_zeros_without_memory_can_be_read():
    assert ag.share(torch._efficientzerotensor(2)).tolist() == [0, 0]
