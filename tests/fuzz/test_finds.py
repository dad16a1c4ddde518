"""What the fuzzer found, as short programs. Each one that is not fixed yet says so."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import allgrad as ag
from allgrad.testing import run_ranks


def second_order_with_async_in_lockstep():
    rank = torch.distributed.get_rank()
    x = torch.full((2,), rank + 1.0, dtype=torch.float64, requires_grad=True)
    with ag.lockstep() as step:
        y = ag.all_reduce(x, async_op=True).wait()
        step.backward(y.square().sum(), create_graph=True)
        g, x.grad = x.grad, None
        step.backward(g.square().sum() if rank else None)
    return x.grad


@pytest.mark.timeout(60)
def test_lockstep_second_order_async():
    """One rank does not use the gradient: it skips the second derivative, and the other waits."""
    found = run_ranks(second_order_with_async_in_lockstep, 2, timeout=6)
    # y = 1 + 2; the losses 2 y^2 give g = 4 y; the penalty of rank 1, (4 y)^2, gives 32 y.
    assert [g.tolist() for g in found] == [[96.0, 96.0]] * 2


def checkpoint_that_saves_on_one_rank():
    x = torch.full((2,), 1.0, dtype=torch.float64, requires_grad=True)
    y = checkpoint(lambda x: ag.reduce(x, dst=1, op="max") * 1.5, x, use_reentrant=False)
    y.sum().backward()
    return x.grad


@pytest.mark.timeout(60)
def test_checkpoint_that_saves_on_one_rank():
    """Only dst has pieces to save for backward; all ranks must call the collective again."""
    found = run_ranks(checkpoint_that_saves_on_one_rank, 3, timeout=20)
    assert [g.tolist() for g in found] == [[0.5, 0.5]] * 3


def waited_in_another_order(lockstep):
    rank = torch.distributed.get_rank()
    x = torch.full((2,), rank + 1.0, dtype=torch.float64, requires_grad=True)
    y = torch.full((2,), rank + 1.0, dtype=torch.float64, requires_grad=True)
    with ag.lockstep() if lockstep else contextlib.nullcontext() as step:
        first, second = ag.all_reduce(x, async_op=True), ag.all_reduce(y, async_op=True)
        for handle in (second, first) if rank else (first, second):
            handle.wait()
        loss = first.wait().sum() + 10 * second.wait().sum()
    if step is None:
        loss.backward()
    else:
        step.backward(loss)
    return x.grad, y.grad


@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.timeout(60)
def test_handles_waited_in_another_order(lockstep):
    """The same calls in the same order, waited for in another order on one rank."""
    found = run_ranks(waited_in_another_order, 2, lockstep, timeout=20)
    assert [[g.tolist() for g in by_rank] for by_rank in found] == [[[2.0] * 2, [20.0] * 2]] * 2


def handle_of_a_subgroup():
    group = dist.new_group([1, 2])
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    handle = ag.share(x, async_op=True)
    if dist.get_rank():
        ag.reduce(x, group=group, async_op=True).wait()
    y = ag.reduce_scatter(x, sizes=(1, 1, 0))
    ((dist.get_rank() + 1) * handle.wait().sum() + 10 * y.sum()).backward()
    return x.grad


@pytest.mark.timeout(60)
def test_handles_of_a_subgroup_leave_others_where_they_are():
    """Ranks of a subgroup wait for a call of it; a call of the world that was started before does not move."""
    found = run_ranks(handle_of_a_subgroup, 3, timeout=20)
    assert [g.tolist() for g in found] == [[16.0, 16.0]] * 3


def nest_without_grad():
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    first, second = ag.all_reduce([x.detach(), x.detach()], grad="none")
    loss = (x * second).sum()
    first.mul_(3)
    loss.backward()
    return x.grad


@pytest.mark.timeout(60)
def test_nest_without_grad_changed_in_place():
    """Changing one result breaks what was computed from the other."""
    assert [g.tolist() for g in run_ranks(nest_without_grad, 2, timeout=20)] == [[2.0, 2.0]] * 2


def dynamic_shift_in_lockstep():
    x = torch.full((1, 2), 1.0 + dist.get_rank(), dtype=torch.float64, requires_grad=True)

    @torch.compile(backend="eager", dynamic=True)
    def block(x):
        return ag.shift(x.sin(), dim=1, offset=-2, wrap=False, sizes=(2, 2, 2)) * 2

    with ag.lockstep() as step:
        y = block(x)
    step.backward(y.sum())
    return y.detach(), x.grad


@pytest.mark.timeout(90)
def test_dynamic_shift_in_lockstep():
    """TorchDynamo leaves the graph while the call is described, and makes the offset symbolic."""
    found = run_ranks(dynamic_shift_in_lockstep, 3, timeout=60)
    third = torch.full((1, 2), 3.0, dtype=torch.float64)
    torch.testing.assert_close(found[0][0], 2 * third.sin())
    torch.testing.assert_close(found[2][1], 2 * third.cos())
    assert [y.count_nonzero().item() for y, _ in found] == [2, 0, 0]


def maximum_compiled_on_one_rank():
    x = torch.tensor([[1.0], [2.0]], dtype=torch.float64) * (dist.get_rank() + 1)
    x.requires_grad_()

    def block(x):
        own = ag.reduce_scatter(x, sizes=(2, 0)), ag.split(x, sizes=(2, 0))
        return ag.all_reduce(x, "max"), ag.scan(x, "max"), ag.reduce(x, op="max"), *own

    with ag.checked():
        compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
        found = compiled(x) if dist.get_rank() else block(x)
        sum(y.sum() for y in found).backward()
    return x.grad


@pytest.mark.timeout(90)
def test_checked_maximum_compiled_on_one_rank():
    """The pieces of a maximum are stacked inside the graph, and backward sees other shapes than forward."""
    first, second = run_ranks(maximum_compiled_on_one_rank, 2, timeout=60)
    assert (first.tolist(), second.tolist()) == ([[3.0], [3.0]], [[6.0], [6.0]])
