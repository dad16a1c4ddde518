"""What surrounds a call: autocast, gradients that torch hands on in other forms, and results changed in place."""

import contextlib

import pytest
import torch
from torch.autograd import forward_ad

import allgrad as ag
from exactness import leaf, random, same


@pytest.mark.ranks(3)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(rank, world, dtype):
    """What the wire packs stays as it is: autocast on the CPU takes no float16 in torch.cat."""
    xs = [random((2, 3), r).to(dtype) for r in range(world)]
    with torch.autocast("cpu"):
        joined = ag.all_gather(xs[rank], 1)
        largest = ag.all_reduce(xs[rank], "max")
        exchanged = ag.all_to_all(random((3, 2), rank).to(dtype), 0)
        first, _ = ag.all_gather([xs[rank], xs[rank]], grad="none")
    assert torch.equal(joined, torch.cat(xs, 1))
    assert torch.equal(largest, torch.stack(xs).amax(0))
    rows = [random((3, 2), r).to(dtype)[rank] for r in range(world)]
    assert torch.equal(exchanged, torch.stack(rows))
    assert torch.equal(first, torch.cat(xs))


CALLS = {
    "all_gather": ag.all_gather,
    "all_reduce": ag.all_reduce,
    "reduce_scatter": ag.reduce_scatter,
    "all_to_all": ag.all_to_all,
    "gather": ag.gather,
    "scatter": ag.scatter,
    "shift": ag.shift,
    "broadcast": ag.broadcast,
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", CALLS)
def test_backward_of_a_tangent_gets_zeros_without_memory(rank, name):
    """The tangent of a linear map does not depend on the value: torch hands on zeros."""
    x = leaf(random((4, 3), rank))
    with forward_ad.dual_level():
        y = CALLS[name](forward_ad.make_dual(x, random((4, 3), 7 + rank))) * 3.0
        forward_ad.unpack_dual(y).tangent.sum().backward()
    same(x.grad, torch.zeros(4, 3, dtype=torch.float64), "the gradient")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("tied", [False, True], ids=["plain", "lockstep"])
def test_batched_gradients(rank, world, tied):
    """is_grads_batched=True: one message for the batch, and what one gradient at a time gives."""
    x, batch = leaf(random((3,), rank)), random((4, 3), 9 + rank)

    def run():
        first, second = ag.all_gather([x.sin(), x[: rank + 1] * 2])
        return first.view(world, 3).sum(0) + ag.all_reduce(x.cos(), "mean") * second.sum()

    with ag.lockstep() if tied else contextlib.nullcontext():
        y = run()
    (got,) = torch.autograd.grad(y, x, batch, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(y, x, one, retain_graph=True)[0] for one in batch]
    same(got, torch.stack(each), "the gradients")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("tied", [False, True], ids=["plain", "lockstep"])
def test_batched_gradients_of_async_calls(rank, world, tied):
    x, batch = leaf(random((3,), rank)), random((4, 3), 9 + rank)
    with ag.lockstep() if tied else contextlib.nullcontext():
        first = ag.all_gather([x.sin(), x[: rank + 1] ** 2], async_op=True)
        second = ag.all_reduce(x.cos(), "mean", async_op=True)
        joined, other = first.wait()
        y = joined.view(world, 3).sum(0) + second.wait() * other.sum()
    options = {"retain_graph": True, "create_graph": not tied}
    (got,) = torch.autograd.grad(y, x, batch, is_grads_batched=True, **options)
    each = torch.stack([torch.autograd.grad(y, x, one, **options)[0] for one in batch])
    same(got, each, "the gradients")
    if not tied:
        seconds = [torch.autograd.grad((g * batch).sum(), x, **options)[0] for g in (got, each)]
        same(*seconds, "the second derivatives")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", CALLS)
def test_batched_gradients_beside_dual_numbers(rank, name):
    """Of the value and of the tangent, while the dual level is there and after it."""
    x, t = leaf(random((4, 3), rank)), random((4, 3), 7 + rank)

    def rows_of(y):
        batch = random((2, *y.shape), 9 + rank)
        (got,) = torch.autograd.grad(y, x, batch, is_grads_batched=True, retain_graph=True)
        each = [torch.autograd.grad(y, x, one, retain_graph=True)[0] for one in batch]
        same(got, torch.stack(each), "the gradients")

    with forward_ad.dual_level():
        y = CALLS[name](forward_ad.make_dual(x, t).sin()).sin()
        value, tangent = forward_ad.unpack_dual(y)
        rows_of(value)
        rows_of(tangent)
    rows_of(value)
    rows_of(tangent)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("way", ["plain", "nest", "async", "lockstep", "dual", "graph"])
def test_sparse_gradient_of_one_rank(rank, world, way):
    """A table that rank 1 looks up with sparse=True: its gradient is that of a dense one."""
    xs = [leaf(random((2, 3), r)) for r in range(world)]
    x, rows = xs[rank], [torch.tensor([r, 0, 5, r]) for r in range(world)]

    def table(x):
        if way == "nest":
            return ag.all_gather([x, x * 2])[0]
        return ag.all_gather(x, async_op=True).wait() if way == "async" else ag.all_gather(x)

    run = torch.compile(table, backend="eager") if way == "graph" else table
    with contextlib.ExitStack() as stack:
        if way in {"lockstep", "dual"}:
            stack.enter_context(ag.lockstep() if way == "lockstep" else forward_ad.dual_level())
        found = torch.nn.functional.embedding(rows[rank], run(x), sparse=rank == 1)
    (slope,) = torch.autograd.grad(found.sin().sum(), x)
    whole = torch.cat(xs)
    total = sum(whole[r].sin().sum() for r in rows)
    same(slope, torch.autograd.grad(total, x)[0], "the gradient")


RESHAPED = {
    "all_gather": lambda x, **options: ag.all_gather(x, 1, **options),
    "reduce_scatter": lambda x, **options: ag.reduce_scatter(x, 1, **options),
    "gather": lambda x, **options: ag.gather(x, 0, 1, **options),
    "scatter": lambda x, **options: ag.scatter(x, 0, 1, **options),
    "shift": lambda x, **options: ag.shift(x, dim=1, **options),
    "scan": ag.scan,
}


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("name", RESHAPED)
def test_results_without_gradient_may_be_changed_in_place(rank, name):
    """By what requires grad, as where a rank puts its own features back among those of all ranks."""
    x = leaf(random((3, 4), rank))
    with torch.no_grad():
        results = [RESHAPED[name](x)]
    results.append(RESHAPED[name](x, grad="none"))
    for y in results:
        factor, value = leaf(random(y.shape, 5)), y.clone()
        y.mul_(factor).sum().backward()
        same(factor.grad, value, "the gradient")
