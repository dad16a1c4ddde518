"""What can go wrong between ranks, one function each. Every rank runs it; the faulty one is rank 1.

A scenario returns nothing when it ends well, having checked its numbers itself.
"""

import os
import signal
import threading
import time

import torch
import torch.distributed as dist

import allgrad as ag
from exactness import grads, loss, random, same

FAULTY = 1
SCENARIOS = {}


def scenario(*, world=3, expect, faulty=None, within=12.0):
    """Register a scenario: what the other ranks end with, and what the faulty one does."""

    def register(body):
        title = body.__doc__.strip().rstrip(".")
        SCENARIOS[body.__name__] = (body, title, world, expect, faulty or expect, within)
        return body

    return register


def here():
    return dist.get_rank(), dist.get_world_size()


def piece(rank, seed=0):
    return random((rank + 1, 2), seed + rank).requires_grad_()


def joined_gradient(rank, world, losses):
    """The reference: one process holding all pieces, with each rank's loss of the joined pieces."""
    leaves = [piece(r) for r in range(world)]
    total = sum(fn(torch.cat(leaves)) for fn in losses if fn is not None)
    return grads(total, leaves)[rank]


# ---------------------------------------------------------------- lockstep: no fault, exact


@scenario(expect="exact")
def unused_result():
    """A result is not used on one rank."""
    rank, world = here()
    x = piece(rank)
    with ag.lockstep() as step:
        y = ag.all_gather(x)
        total = loss(y, rank) if rank != FAULTY else (x * 0).sum()
    step.backward(total)
    fns = [None if r == FAULTY else (lambda y, r=r: loss(y, r)) for r in range(world)]
    same(x.grad, joined_gradient(rank, world, fns), "the gradient")


@scenario(expect="exact")
def no_loss():
    """A rank has no loss."""
    rank, world = here()
    x = piece(rank)
    with ag.lockstep() as step:
        y = ag.all_gather(x)
    if rank == FAULTY:
        step.backward()
    else:
        step.backward(loss(y, rank))
    fns = [None if r == FAULTY else (lambda y, r=r: loss(y, r)) for r in range(world)]
    same(x.grad, joined_gradient(rank, world, fns), "the gradient")


@scenario(expect="exact")
def results_in_another_order():
    """The collectives' results are used in another order."""
    rank, world = here()
    x = piece(rank)
    with ag.lockstep() as step:
        a, b = ag.all_gather(x), ag.all_gather(x.sin())
        total = (b.sum() + a.sum() * 2) if rank == FAULTY else (a.sum() * 2 + b.sum())
    step.backward(total)
    fns = [lambda y: y.sum() * 2 + y.sin().sum()] * world
    same(x.grad, joined_gradient(rank, world, fns), "the gradient")


@scenario(expect="exact")
def two_losses_in_another_order():
    """Two backwards are called in another order."""
    rank, world = here()
    x = piece(rank)
    with ag.lockstep() as step:
        a, b = ag.all_gather(x), ag.all_gather(x.sin())
        losses = [a.sum() * 2, b.sum()]
    step.backward(losses[::-1] if rank == FAULTY else losses)
    fns = [lambda y: y.sum() * 2 + y.sin().sum()] * world
    same(x.grad, joined_gradient(rank, world, fns), "the gradient")


def sums_and_gathers_a_second_late(rank, world, go_backward):
    """Whoever waits looks about meanwhile, and must not take a slow rank for a lost one."""
    late = 1.2 * (rank == FAULTY)
    x = piece(rank)
    time.sleep(late)
    y = ag.all_gather(ag.all_reduce(ag.broadcast(x.sum(0), FAULTY)) + x)
    time.sleep(late)
    go_backward(loss(y, rank))

    def losses(joined):
        pieces = joined.split([r + 1 for r in range(world)])
        everyone = pieces[FAULTY].sum(0) * world
        return [loss(torch.cat([everyone + p for p in pieces]), r) for r in range(world)]

    leaves = [piece(r) for r in range(world)]
    want = grads(sum(losses(torch.cat(leaves))), leaves)[rank]
    same(x.grad, want, "the gradient")


@scenario(expect="exact")
def slow_in_lockstep():
    """A rank comes a second late, in lockstep."""
    with ag.lockstep() as step:
        sums_and_gathers_a_second_late(*here(), step.backward)


@scenario(expect="exact")
def slow_within_a_deadline():
    """A rank comes a second late, within the deadline."""
    with ag.deadline(6):
        sums_and_gathers_a_second_late(*here(), torch.Tensor.backward)


# ---------------------------------------------------------------- checked: differences


@scenario(expect="CollectiveMismatch")
def two_backwards_in_another_order():
    """Two backwards in another order, checked, without lockstep."""
    rank, _ = here()
    x = piece(0)
    with ag.checked():
        a, b = ag.all_reduce(x), ag.all_reduce(x.sin())
        for y in (b, a) if rank == FAULTY else (a, b):
            y.sum().backward()


@scenario(expect="CollectiveMismatch")
def different_branches():
    """Different branches call different collectives."""
    rank, _ = here()
    x = torch.ones(4)
    with ag.checked():
        if rank == FAULTY:
            ag.all_gather(x, sizes="equal")
        else:
            ag.all_reduce(x)


@scenario(expect="CollectiveMismatch")
def one_more_collective():
    """One rank makes one call more."""
    rank, _ = here()
    x = torch.ones(4)
    with ag.checked():
        if rank == FAULTY:
            ag.all_reduce(x)
        ag.broadcast(x, 0)


@scenario(expect="CollectiveMismatch")
def one_fewer_collective():
    """One rank makes one call fewer."""
    rank, _ = here()
    x = torch.ones(4)
    with ag.checked():
        if rank != FAULTY:
            ag.all_reduce(x)
        ag.broadcast(x, 0)


@scenario(expect="CollectiveMismatch")
def another_reduction():
    """One rank asks for another reduction."""
    with ag.checked():
        ag.all_reduce(torch.ones(4), "mean" if here()[0] == FAULTY else "sum")


@scenario(expect="CollectiveMismatch")
def another_dtype():
    """One rank brings another dtype."""
    with ag.checked():
        ag.all_reduce(torch.ones(4, dtype=torch.float64 if here()[0] == FAULTY else torch.float32))


@scenario(expect="CollectiveMismatch")
def another_shape():
    """One rank brings another shape."""
    with ag.checked():
        ag.all_reduce(torch.ones((2, 3) if here()[0] == FAULTY else (3, 2)))


@scenario(expect="CollectiveMismatch")
def other_sizes():
    """One rank gives other sizes."""
    rank, _ = here()
    with ag.checked():
        ag.all_gather(torch.ones(2), sizes=(1, 2, 2) if rank == FAULTY else (2, 2, 2))


@scenario(expect="CollectiveMismatch")
def another_src():
    """One rank names another src."""
    with ag.checked():
        ag.broadcast(torch.ones(2), int(here()[0] == FAULTY))


@scenario(expect="CollectiveMismatch")
def unequal_pieces_called_equal():
    """Pieces promised to be equal are not."""
    with ag.checked():
        ag.all_gather(torch.ones(2 + (here()[0] == FAULTY)), sizes="equal")


@scenario(expect="CollectiveMismatch")
def calls_from_two_threads():
    """Two threads call in another order."""
    rank, _ = here()
    calls = [
        lambda: ag.all_reduce(torch.ones(2)),
        lambda: ag.all_gather(torch.ones(2), sizes="equal"),
    ]
    errors = []

    def run(call):
        try:
            call()
        except ag.errors.CollectiveMismatch as error:
            errors.append(error)

    with ag.checked():
        for call in calls[::-1] if rank == FAULTY else calls:
            thread = threading.Thread(target=run, args=(call,))
            thread.start()
            thread.join()
    assert len(errors) == 2
    raise errors[0]


# ---------------------------------------------------------------- errors on one rank


@scenario(expect="RankRaised", faulty="ZeroDivisionError")
def error_in_forward():
    """An exception in forward on one rank, without a deadline."""
    rank, _ = here()
    with ag.lockstep():
        y = ag.all_gather(piece(rank))
        if rank == FAULTY:
            1 / 0  # noqa: B018
        ag.all_reduce(y)


@scenario(expect="RankRaised", faulty="ZeroDivisionError")
def error_in_forward_checked():
    """An exception in forward on one rank, checked: the group works afterwards."""
    rank, world = here()
    try:
        with ag.checked(), ag.lockstep():
            y = ag.all_gather(piece(rank))
            if rank == FAULTY:
                1 / 0  # noqa: B018
            ag.all_reduce(y)
    finally:
        assert ag.all_reduce(torch.ones(1)).item() == world


@scenario(expect="RankRaised", faulty="ZeroDivisionError")
def error_in_backward():
    """An exception in backward on one rank."""
    rank, _ = here()
    x = piece(rank)

    def hook(_):
        raise ZeroDivisionError("in backward")

    with ag.deadline(6), ag.lockstep() as step:
        first = ag.all_gather(x)
        if rank == FAULTY:
            first.register_hook(hook)
        y = ag.all_reduce(first.sin())
        step.backward(y.sum())


# ---------------------------------------------------------------- ranks that do not come


@scenario(expect="RankLost", faulty="killed")
def killed_in_forward():
    """SIGKILL of a rank in forward."""
    rank, _ = here()
    ag.all_reduce(torch.ones(2))
    if rank == FAULTY:
        os.kill(os.getpid(), signal.SIGKILL)
    ag.all_reduce(torch.ones(2))


@scenario(expect="RankLost", faulty="killed")
def killed_in_backward():
    """SIGKILL of a rank in backward."""
    rank, _ = here()
    x = piece(rank)
    y = ag.all_gather(x)
    if rank == FAULTY:
        y.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    y.sum().backward()


LARGE = 1 << 21  # elements: every rank has a share of the work


@scenario(world=4, expect="RankLost", faulty="killed")
def killed_in_a_large_sum():
    """SIGKILL of a rank in a large all_reduce."""
    rank, _ = here()
    if rank == FAULTY:
        os.kill(os.getpid(), signal.SIGKILL)
    ag.all_reduce(torch.ones(LARGE))


@scenario(world=4, expect="RankLost", faulty="killed")
def killed_in_a_large_backward():
    """SIGKILL of a rank in the backward of a large broadcast."""
    rank, _ = here()
    y = ag.broadcast(torch.ones(LARGE, requires_grad=True))
    if rank == FAULTY:
        y.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    y.sum().backward()


@scenario(world=4, expect="RankLost", faulty="killed")
def killed_source():
    """SIGKILL of the source of a large broadcast."""
    rank, _ = here()
    if rank == FAULTY:
        os.kill(os.getpid(), signal.SIGKILL)
    ag.broadcast(torch.ones(LARGE), FAULTY)


@scenario(world=4, expect="RankLost", faulty="killed")
def killed_in_an_exchange():
    """SIGKILL of a rank in an all_to_all in turns."""
    rank, world = here()
    x = torch.ones(world, 1 << 14)
    ag.all_to_all(x, send_sizes="equal")
    if rank == FAULTY:
        os.kill(os.getpid(), signal.SIGKILL)
    ag.all_to_all(x, send_sizes="equal")


@scenario(expect="RankLate", faulty="RankLate")
def stopped():
    """SIGSTOP of a rank, which comes back after the others gave up."""
    rank, _ = here()
    pids = ag.all_gather(torch.tensor([os.getpid()])).tolist()
    with ag.deadline(2):
        if rank == FAULTY:
            os.kill(os.getpid(), signal.SIGSTOP)
        try:
            ag.all_reduce(torch.ones(2))
        finally:
            if rank == 0:
                os.kill(pids[FAULTY], signal.SIGCONT)


@scenario(expect="RankLate", faulty="RankLate")
def joins_late():
    """A rank joins after the deadline."""
    rank, _ = here()
    with ag.deadline(2):
        if rank == FAULTY:
            time.sleep(6)
        ag.all_reduce(torch.ones(2))


@scenario(expect="RankLate", faulty="RankLate")
def late_and_checked():
    """A rank is late, checked: its last call is named."""
    rank, _ = here()
    with ag.deadline(2), ag.checked():
        ag.all_reduce(torch.ones(7))
        if rank == FAULTY:
            time.sleep(6)
        try:
            ag.broadcast(torch.ones(2))
        except ag.errors.RankLate as error:
            if rank != FAULTY:
                assert "last agreed on all_reduce(op=sum, grad=sum, (7) float32)" in str(error)
            raise


@scenario(expect="RankLate")
def two_groups_in_opposite_order():
    """Two groups are used in opposite order."""
    rank, _ = here()
    a, b = dist.new_group([0, 1, 2]), dist.new_group([0, 1, 2])
    for group in (a, b):
        ag.all_reduce(torch.ones(1), group=group)
    with ag.deadline(2):
        for group in (b, a) if rank == FAULTY else (a, b):
            ag.all_reduce(torch.ones(2), group=group)


@scenario(world=3, expect="RankLost", faulty="killed")
def store_goes_away():
    """The store goes away, with the rank that keeps it."""
    rank, world = here()
    port = 0
    if rank == FAULTY:
        store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
        port = store.port
    port = ag.broadcast(torch.tensor([port]), FAULTY).item()
    if rank != FAULTY:
        store = dist.TCPStore("127.0.0.1", port, world, is_master=False)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    ag.all_reduce(torch.ones(2))
    if rank == FAULTY:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    ag.all_reduce(torch.ones(2))
