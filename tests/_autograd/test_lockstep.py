"""lockstep: nested, repeated, twice differentiated, checkpointed, and gone when it is done."""

import gc
import signal
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import allgrad as ag
from allgrad import errors
from allgrad._autograd.backward_order import current_chain
from exactness import grads, leaf, loss, random, same


def piece(rank):
    return random((rank + 1, 2), rank).requires_grad_()


def reference(rank, world, fn, *, skip=()):
    """The gradient of the sum of ``fn(joined, r)`` over ranks, in one process."""
    leaves = [piece(r) for r in range(world)]
    total = sum(fn(torch.cat(leaves), r) for r in range(world) if r not in skip)
    return grads(total, leaves)[rank]


@pytest.mark.ranks(2, 3)
def test_backward_runs_in_reverse_on_every_rank(rank, world):
    """The collectives' own order of backward, noted as it happens."""
    seen = []
    x = piece(rank)
    with ag.lockstep() as step:
        results = [ag.all_gather(x * k) for k in range(1, 5)]
        for k, y in enumerate(results):
            y.grad_fn.register_prehook(lambda _, k=k: seen.append(k))
    used = results[::-1] if rank else results[:1]
    step.backward(sum(y.sum() for y in used))
    assert seen == [3, 2, 1, 0]


@pytest.mark.ranks(3)
def test_tie_leaves_the_value_and_reaches_everyone(rank, world):
    x = piece(rank)
    with ag.lockstep() as step:
        y = ag.all_gather(x)
        own = loss(y, rank) if rank != 1 else torch.zeros((), dtype=torch.float64)
        tied = step.tie(own)
    assert tied.item() == own.item()
    tied.backward()
    same(x.grad, reference(rank, world, loss, skip=[1]), "the gradient")


@pytest.mark.ranks(3)
def test_nested_blocks_have_a_backward_each(rank, world):
    x = piece(rank)
    with ag.lockstep() as outer:
        y = ag.all_gather(x)
        with ag.lockstep() as inner:
            z = ag.all_gather(x.detach().requires_grad_())
            inner.backward(z.sum() if rank else None)
        outer.backward(loss(y, rank) if rank else None)
    same(x.grad, reference(rank, world, loss, skip=[0]), "the outer gradient")


@pytest.mark.ranks(3)
def test_gradients_accumulate_over_blocks(rank, world):
    x = piece(rank)
    for turn in range(world):  # another rank is without a loss each time
        with ag.lockstep() as step:
            y = ag.all_gather(x)
        step.backward(None if turn == rank else loss(y, rank))
    want = sum(reference(rank, world, loss, skip=[turn]) for turn in range(world))
    same(x.grad, want, "the accumulated gradient")


@pytest.mark.ranks(3)
def test_retained_graph_goes_backward_twice(rank, world):
    x = piece(rank)
    with ag.lockstep() as step:
        y = ag.all_gather(x)
        total = loss(y, rank) if rank else None
    step.backward(total, retain_graph=True)
    step.backward(total)
    same(x.grad, 2 * reference(rank, world, loss, skip=[0]), "twice the gradient")


@pytest.mark.ranks(3)
def test_second_derivative_with_a_rank_that_has_no_loss(rank, world):
    leaves = [piece(r) for r in range(world)]
    joined = torch.cat(leaves)
    first = grads(sum(loss(joined, r) for r in range(1, world)), leaves, graph=True)
    second = grads(sum(g.square().sum() for g in first[1:]), leaves)
    x = piece(rank)
    with ag.lockstep() as step:
        y = ag.all_gather(x)
        step.backward(loss(y, rank) if rank else None, create_graph=True)
        g, x.grad = x.grad, None
        same(g.detach(), first[rank].detach(), "the first derivative")
        step.backward(g.square().sum() if rank else None)
    same(x.grad, second[rank], "the second derivative")


@pytest.mark.ranks(2)
def test_only_the_given_inputs_get_gradients(rank, world):
    x, w = piece(rank), leaf(random((6,), 5))
    with ag.lockstep() as step:
        y = ag.all_gather(x)
        z = ag.all_reduce(w.sin())
    total = (y.sum() if rank else 0) + z.sum()
    step.backward(total, inputs=[w])
    assert x.grad is None
    same(w.grad, world * w.detach().cos(), "the gradient asked for")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_inside(rank, world, reentrant):
    x = piece(rank)

    def part(x):
        return ag.all_gather(x.sin()).exp()

    with ag.lockstep() as step:
        y = checkpoint(part, x, use_reentrant=reentrant)
        step.backward(loss(y, rank))
    want = reference(rank, world, lambda joined, r: loss(joined.sin().exp(), r))
    same(x.grad, want, "the gradient")


@pytest.mark.ranks(3)
def test_groups_of_all_kinds_in_one_block(rank, world):
    pair = dist.new_group([0, 2])
    x = random((2,), rank).requires_grad_()
    with ag.lockstep() as step:
        a = ag.all_reduce(x)
        b = ag.all_reduce(x * x, group=pair) if rank != 1 else x
        c = ag.all_gather(x)
    step.backward({0: a.sum(), 1: None, 2: (b.sum() + c.sum())}[rank])
    xs = [random((2,), r).requires_grad_() for r in range(world)]
    total = sum(xs).sum() + (xs[0] ** 2 + xs[2] ** 2).sum() + torch.cat(xs).sum()
    same(x.grad, grads(total, xs)[rank], "the gradient")


@pytest.mark.ranks(2)
def test_nothing_is_kept_alive(rank):
    gc.disable()
    try:
        x = piece(0)
        with ag.lockstep() as step:
            hidden = x.exp()
            y = ag.all_gather(hidden)
            total = y.sum()
        kept = [weakref.ref(t) for t in (hidden, y)]
        step.backward(total)
        del hidden, y, total
        assert [ref() for ref in kept] == [None, None]
    finally:
        gc.enable()


@pytest.mark.ranks(2)
def test_wrong_losses_are_named(rank):
    with ag.lockstep() as step:
        y = ag.all_gather(piece(0))
    with pytest.raises(errors.InputError, match=r"a loss is \(2, 2\) float64"):
        step.backward(y)
    with pytest.raises(errors.InputError, match="a loss is float"):
        step.backward([1.0])
    with pytest.raises(errors.InputError, match="the loss is int"):
        step.tie(3)
    step.backward()


def raises_inside():
    with ag.lockstep():
        raise ZeroDivisionError


ERROR = ValueError("one object, raised in every block")


def raises_one_object():
    raise ERROR


def sums():
    return ag.all_reduce(torch.ones(2))


# What rank 1 does in a block, the others meanwhile, and what rank 1 raises.
TOLD = {
    "in a block inside": (raises_inside, sums, ZeroDivisionError),
    "by a call": (lambda: ag.all_reduce(torch.ones(2), op="no"), sums, errors.ReductionError),
    "by join": (
        lambda: list(ag.join(1 / 0 for _ in range(2))),
        lambda: list(ag.join([torch.ones(2)])),
        ZeroDivisionError,
    ),
    "by the program": (raises_one_object, sums, ValueError),
}


def in_a_block(call):
    with ag.lockstep():
        sums()
        call()


@pytest.mark.ranks(3)
def test_an_error_that_leaves_several_blocks_is_told_once(rank, world):
    with ag.deadline(5), ag.checked(sites=False):
        for fails, others, error in [*TOLD.values(), *TOLD.values()]:
            with pytest.raises(error if rank == 1 else errors.RankRaised):
                in_a_block(fails if rank == 1 else others)
            assert sums().tolist() == [world, world]


def interrupt(*_):
    raise KeyboardInterrupt


def interrupted_in_its_second_call(rank):
    if rank == 1:
        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
    with ag.deadline(20), ag.checked(), ag.lockstep():
        sums()
        time.sleep(0.0 if rank == 1 else 1.5)
        sums()


@pytest.mark.ranks(3)
def test_an_interrupt_inside_a_checked_call_ends_it_on_all_ranks(rank):
    """Rank 1 is interrupted while it waits for the others, who then come to the same call."""
    sums()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt if rank == 1 else errors.RankRaised):
        interrupted_in_its_second_call(rank)
    assert time.monotonic() - began < 10


def block_of_a_generator():
    with ag.lockstep() as step:
        ag.all_reduce(torch.ones(2))
        yield step


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", [ag.checked, ag.lockstep])
def test_a_generator_that_is_closed_inside_a_block_is_no_failure(rank, world, mode):
    """Python closes it when nobody holds it any more, which is not the same moment on every rank."""
    with ag.deadline(5), mode():
        held = block_of_a_generator()
        next(held)
        if rank == 1:
            held.close()
            time.sleep(1.2)
        assert ag.all_reduce(torch.ones(2)).tolist() == [world, world]
        held.close()


def empty_block():
    with ag.lockstep() as step:
        yield step


@pytest.mark.ranks(2)
def test_blocks_of_one_thread_end_in_any_order(rank, world):
    x = leaf(random((3,), rank))
    first, second = empty_block(), empty_block()
    next(first)
    step = next(second)
    assert next(first, None) is None
    y = ag.all_reduce(x)  # in the second block, which is open
    assert next(second, None) is None
    assert current_chain() is None
    with ag.deadline(5):
        step.backward(loss(y, 1) if rank else None)
    total = sum(random((3,), r) for r in range(world)).requires_grad_()
    same(x.grad, grads(loss(total, 1), [total])[0], "the gradient")


@pytest.mark.ranks(2)
def test_modes_that_lockstep_cannot_order_are_refused(rank):
    x = piece(0).detach()
    with pytest.raises(errors.ModeError, match="lockstep"), ag.lockstep():
        torch.func.grad(lambda x: ag.all_reduce(x).sum())(x)
    compiled = torch.compile(ag.all_reduce, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="lockstep"), ag.lockstep():
        compiled(piece(0))


@pytest.mark.ranks(2)
def test_a_block_of_another_thread_leaves_this_one_tied(rank):
    """A block that ends in another thread must not untie the collectives of this one."""
    x = leaf(random((3,), rank))

    def empty_block():
        with ag.lockstep():
            pass

    with ag.lockstep() as step:
        thread = threading.Thread(target=empty_block)
        thread.start()
        thread.join()
        y = ag.all_reduce(x)
        total = loss(y, rank) if rank else (x * 0).sum()  # rank 0 does not use it
    step.backward(total)
    leaves = [leaf(random((3,), r)) for r in range(2)]
    same(x.grad, grads(loss(sum(leaves), 1), leaves)[rank], "the gradient")


@pytest.mark.ranks(2)
def test_a_block_of_another_thread_does_not_order_this_one(rank):
    """Only rank 1 has a block in another thread: losses send the same messages, and torch.func works."""
    ids = torch.arange(4)
    begun, over = threading.Event(), threading.Event()

    def block():
        with ag.lockstep():
            begun.set()
            over.wait(20)

    def gradients():
        x = leaf(random((4, 3), rank))
        ag.losses.supcon_loss(x, x, 2.0, ids, ids).backward()
        total = torch.func.grad(lambda x: ag.all_reduce(x).square().sum())(x.detach())
        return x.grad, total

    wanted = [gradients() for _ in range(3)][-1]  # now the call is expected
    thread = threading.Thread(target=block)
    if rank:
        thread.start()
        begun.wait(20)
    try:
        found = gradients()
    finally:
        over.set()
    if rank:
        thread.join()
    for got, want in zip(found, wanted, strict=True):
        same(got, want, "the gradient")
