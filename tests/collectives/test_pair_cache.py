"""A repeated call takes its pair from the cache, and is as right as the first."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

import allgrad as ag
from allgrad import errors
from allgrad._wire import primitives as wire
from allgrad.collectives import _pair_cache
from allgrad.testing import run_ranks
from exactness import leaf, random, same

CALLS = {
    "all_reduce": lambda x, g: ag.all_reduce(x, "mean", group=g),
    "all_reduce, same": lambda x, g: ag.all_reduce(x, group=g, grad="same"),
    "all_reduce, none": lambda x, g: ag.all_reduce(x, group=g, grad="none"),
    "all_gather": lambda x, g: ag.all_gather(x, 1, sizes=[3, 3], group=g),
    "all_gather, equal": lambda x, g: ag.all_gather(x, sizes="equal", group=g),
    "reduce_scatter": lambda x, g: ag.reduce_scatter(x, 0, "mean", sizes=(1, 3), group=g),
    "broadcast": lambda x, g: ag.broadcast(x, 1, group=g),
    "all_to_all": lambda x, g: ag.all_to_all(x, send_sizes="equal", group=g),
    "all_reduce, async": lambda x, g: ag.all_reduce(x, group=g, async_op=True).wait(),
    "reduce_scatter, async": lambda x, g: ag.reduce_scatter(
        x, sizes=(1, 3), group=g, grad="none", async_op=True
    ).wait(),
    "shift, async": lambda x, g: ag.shift(x, sizes=(4, 4), group=g, async_op=True).wait(),
}


def result(call, x, group):
    """The value and what comes back for it, both of them new tensors."""
    x = leaf(x)
    y = call(x, group)
    if not y.requires_grad:
        return y, y
    (g,) = torch.autograd.grad((y * torch.arange(y.numel()).view(y.shape)).sum(), x)
    return y.detach(), g


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", CALLS)
def test_the_short_way_gives_the_same(rank, name):
    call, x = CALLS[name], random((4, 3), rank)
    for group in (None, dist.group.WORLD):
        _pair_cache._PAIRS.clear()
        first = result(call, x, group)
        assert len(_pair_cache._PAIRS) == 1
        resolve, wire.resolve = wire.resolve, None  # the long way would fail now
        try:
            again = result(call, x, group)
        finally:
            wire.resolve = resolve
        for a, b in zip(again, first, strict=True):
            assert torch.equal(a, b)


@pytest.mark.ranks(2)
def test_what_differs_is_looked_at(rank):
    x = random((4, 3), rank)
    with pytest.raises(errors.InputError):
        ag.all_gather(x, sizes=(4, 5) if rank else (5, 4))
    ag.all_gather(x, sizes=(4, 4))
    with pytest.raises(errors.InputError):
        ag.all_gather(x[:3], sizes=(4, 4))
    with pytest.raises(errors.InputError):
        ag.all_gather(x, 2, sizes=(4, 4))
    with pytest.raises(errors.InputError):
        ag.all_reduce(x > 0)
    same(ag.all_gather(x.float(), sizes=(4, 4)).double(), ag.all_gather(x.float()).double(), "")
    number = torch.tensor(float(rank))
    for _ in range(2):
        assert ag.all_gather(number, sizes="equal").tolist() == [0.0, 1.0]
    for _ in range(2):  # arguments that cannot be looked up
        assert ag.all_reduce(number, op=dist.ReduceOp.SUM).item() == 1.0
        with pytest.raises(errors.InputError):
            ag.all_reduce(number, op=["sum"])


@pytest.mark.ranks(2)
def test_checked_calls_take_the_long_way(rank):
    x = random((2,), rank)
    for op in ("sum", "mean"):
        ag.all_reduce(x, op)
    # Remembered pairs know neither the arguments nor the line they came from.
    with ag.checked(), pytest.raises(errors.CollectiveMismatch, match="op=mean"):
        ag.all_reduce(x, "sum" if rank else "mean")


@pytest.mark.ranks(2)
def test_there_is_room_for_so_many(rank):
    _pair_cache._PAIRS.clear()
    for n in range(_pair_cache._MOST + 2):
        _pair_cache.remember(None, "all_reduce", torch.empty(n), None, "sum", "sum")
    assert len(_pair_cache._PAIRS) == 2
    _pair_cache._PAIRS.clear()


def destroyed():
    group = dist.new_group(backend="gloo")
    kept = weakref.ref(group)
    x = leaf(random((2,), 0))
    y = ag.all_reduce(x, group=group)
    ag.all_reduce(x, group=group)
    dist.barrier()
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert kept() is None
    with pytest.raises(errors.GroupError, match="was destroyed"):
        y.sum().backward()


def test_no_graph_and_no_memory_keeps_a_destroyed_group():
    run_ranks(destroyed, 2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [torch.tensor, lambda sizes: tuple(map(torch.tensor, sizes))])
def test_sizes_that_were_overwritten_are_read_again(rank, kind):
    """The same object with other numbers in it, as a loop that keeps a buffer for sizes has."""
    x, sizes = torch.arange(3.0), kind([2, 1])
    for given in ([2, 1], [1, 2]):
        for kept, n in zip(sizes, given, strict=True):
            kept.fill_(n)
        assert ag.reduce_scatter(x, sizes=sizes).tolist() == (2 * x).split(given)[rank].tolist()


NUMBERS = {
    "broadcast, src": ag.broadcast,
    "reduce, dst": ag.reduce,
    "gather, dst": lambda x, n: ag.gather(x, n, sizes=[3, 3, 3]),
    "gather, dim": lambda x, n: ag.gather(x, 1, n, sizes=[3, 3, 3]),
    "all_gather, dim": lambda x, n: ag.all_gather(x, n, sizes="equal"),
    "reduce_scatter, dim": lambda x, n: ag.reduce_scatter(x, n, sizes="equal"),
    "all_to_all, dim": lambda x, n: ag.all_to_all(x, n, send_sizes="equal"),
    "shift, offset": lambda x, n: ag.shift(x, n, sizes="equal"),
}


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_in_tensors_may_change(rank, name):
    call, x, number = NUMBERS[name], random((3, 3), rank), torch.tensor(0)
    for n in range(2):
        number.fill_(n)
        assert torch.equal(call(x, number), call(x, n))


EQUAL = {
    "broadcast, src": (ag.broadcast, 1, [True, 1.0]),
    "reduce, dst": (ag.reduce, 1, [True, 1.0]),
    "gather, dst": (lambda x, n: ag.gather(x, n, sizes=[3, 3]), 1, [True, 1.0]),
    "gather, dim": (lambda x, n: ag.gather(x, 1, n, sizes=[3, 3]), 1, [True, 1.0]),
    "all_gather, dim": (lambda x, n: ag.all_gather(x, n, sizes="equal"), 1, [True, 1.0]),
    "all_gather, sizes": (lambda x, n: ag.all_gather(x, sizes=n), [3, 3], [[3.0, 3], (3.0, 3.0)]),
    "reduce_scatter, dim": (lambda x, n: ag.reduce_scatter(x, n, sizes=[2, 1]), 1, [True, 1.0]),
    "reduce_scatter, sizes": (
        lambda x, n: ag.reduce_scatter(x, sizes=n),
        [2, 1],
        [[2, True], [2.0, 1]],
    ),
    "all_to_all, dim": (
        lambda x, n: ag.all_to_all(x[:2, :2], n, send_sizes="equal"),
        1,
        [True, 1.0],
    ),
    "shift, offset": (lambda x, n: ag.shift(x, n, sizes="equal"), 1, [True, 1.0]),
    "shift, dim": (lambda x, n: ag.shift(x, dim=n, sizes="equal"), 1, [True, 1.0]),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", EQUAL)
def test_what_equals_an_int_is_looked_at(rank, name):
    call, good, bad = EQUAL[name]
    x = random((3, 3), rank)
    first = call(x, good)
    for other in bad:
        with pytest.raises(errors.InputError):
            call(x, other)
    assert torch.equal(call(x, good), first)
