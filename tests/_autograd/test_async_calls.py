"""async_op: started here, waited for there, and the other way round in backward."""

import functools
import gc
import os
import signal
import threading
import time
import weakref
from concurrent.futures import Future

import pytest
import torch
import torch.distributed as dist

import allgrad as ag
import reference
from allgrad import errors
from allgrad._autograd import async_calls, started_calls
from allgrad._core import call_queue
from allgrad._wire import primitives
from allgrad._wire.groups import find_group
from exactness import check_exact, grads, leaf, loss, pieces, random, same

CALLS = {
    "all_reduce": (ag.all_reduce, reference.all_reduce),
    "all_reduce max": (
        lambda x, **k: ag.all_reduce(x, "max", **k),
        lambda xs: reference.all_reduce(xs, "max"),
    ),
    "all_gather": (ag.all_gather, reference.all_gather),
    "reduce_scatter": (ag.reduce_scatter, reference.reduce_scatter),
    "reduce_scatter prod": (
        lambda x, **k: ag.reduce_scatter(x, op="prod", **k),
        lambda xs: reference.reduce_scatter(xs, 0, "prod"),
    ),
    "all_to_all": (ag.all_to_all, reference.all_to_all),
    "broadcast": (lambda x, **k: ag.broadcast(x, 1, **k), lambda xs: reference.broadcast(xs, 1)),
    "reduce": (lambda x, **k: ag.reduce(x, 1, **k), lambda xs: reference.reduce(xs, 1)),
    "gather": (lambda x, **k: ag.gather(x, 1, **k), lambda xs: reference.gather(xs, 1)),
    "shift": (ag.shift, reference.shift),
    "permute": (
        lambda x, **k: ag.permute(x, [(0, 1)], **k),
        lambda xs: reference.permute(xs, [(0, 1)]),
    ),
    "scan": (ag.scan, reference.scan),
}


@pytest.mark.one_in(4)
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", CALLS)
def test_a_started_call_is_exact(world, name):
    call, model = CALLS[name]
    check_exact(lambda x: call(x, async_op=True).wait(), model, pieces([(3, 2)] * world))


@pytest.mark.ranks(3)
def test_share_split_and_scatter_can_be_started(rank, world):
    check_exact(
        lambda x: ag.split(x, async_op=True).wait(),
        lambda xs: reference.split(xs[0], world),
        pieces([(5, 2)]),
        second="once",
    )
    check_exact(
        lambda x: ag.share(x, async_op=True).wait(),
        lambda xs: [xs[0]] * world,
        pieces([(2,)]),
        second="once",
    )
    check_exact(
        lambda x: ag.scatter(x, 1, async_op=True).wait(),
        lambda xs: reference.scatter(xs[1], world),
        pieces([(5 if r == 1 else 0, 2) for r in range(world)]),
    )


@pytest.mark.ranks(2)
def test_nests_and_whole_numbers(rank, world):
    x = {"a": leaf(random((rank + 1,), rank)), "b": torch.arange(rank + 1)}
    handle = ag.all_gather(x, async_op=True)
    y = handle.wait()
    assert y["b"].tolist() == [0, 0, 1]
    y["a"].sum().backward()
    same(x["a"].grad, torch.full_like(x["a"], world).detach(), "the gradient")
    assert not ag.all_gather(x["a"], grad="none", async_op=True).wait().requires_grad


@pytest.mark.ranks(3)
def test_calls_keep_their_order(rank):
    """Started, plain and started again, waited for in another order on each rank."""
    xs = [torch.full((3,), float(rank + k)) for k in range(4)]
    a = ag.all_reduce(xs[0], async_op=True)
    b = ag.all_gather(xs[1])
    c = ag.scan(xs[2], async_op=True)
    d = ag.broadcast(xs[3], 2, async_op=True)
    waits = [a, c, d]
    for handle in waits[rank:] + waits[:rank]:
        handle.wait()
    assert a.wait().tolist() == [3.0] * 3
    assert b.tolist() == [1.0] * 3 + [2.0] * 3 + [3.0] * 3
    assert c.wait().tolist() == [float(sum(r + 2 for r in range(rank + 1)))] * 3
    assert d.wait().tolist() == [5.0] * 3


@pytest.mark.ranks(2)
def test_waiting_twice_on_another_thread_or_never(rank, world):
    x = leaf(random((4,), rank))
    handle = ag.all_reduce(x, async_op=True)
    first = handle.wait()
    assert handle.wait() is first
    found = []
    other = ag.all_reduce(x, async_op=True)
    thread = threading.Thread(target=lambda: found.append(other.wait()))
    thread.start()
    thread.join()
    never = ag.all_reduce(x, async_op=True)
    (first.sum() + found[0].sum()).backward()
    same(x.grad, torch.full_like(x, 2.0 * world).detach(), "the gradient")
    del never
    assert ag.all_reduce(torch.ones(1)).item() == world


@pytest.mark.ranks(2)
def test_each_handle_waited_for_by_a_thread_of_its_own(rank, world, monkeypatch):
    """The first thread has looked which handles are pending; before it goes on, the others wait for theirs."""
    looked, threads, finished = threading.Event(), [], []

    class Started(list):
        def __iter__(self):
            try:
                yield from tuple(super().__iter__())
            finally:
                if threading.current_thread() is threads[0] and not looked.is_set():
                    looked.set()
                    for thread in threads[1:]:
                        thread.join(0.3)  # long enough to come as far as they can

    def keep_order(pending, ticket, finish=async_calls._finished):
        finished.append(pending.pair)
        return finish(pending, ticket)

    started = Started()
    monkeypatch.setitem(started_calls.STATE.by_group, find_group("test", None), started)
    monkeypatch.setattr(async_calls, "_finished", keep_order)
    x = leaf(random((4,), rank))
    calls = [ag.all_reduce, ag.all_gather, ag.reduce_scatter]
    handles = [call(x, async_op=True) for call in calls]

    def wait(handle):
        assert handle is handles[0] or looked.wait(10)
        handle.wait()

    threads += [threading.Thread(target=wait, args=(h,), daemon=True) for h in handles]
    for thread in reversed(threads):
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads), "they wait for each other"
    assert [pair.name for pair in finished] == [call.__name__ for call in calls]
    assert not started
    sum(handle.wait().sum() for handle in handles).backward()
    same(x.grad, torch.full_like(x, 2.0 * world + 1).detach(), "the gradient")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_waiting_again_for_a_call_that_failed(rank, requires_grad):
    handle = ag.all_reduce(torch.ones(2 + rank, requires_grad=requires_grad), async_op=True)
    with pytest.raises(errors.AllgradError) as first:
        handle.wait()
    with pytest.raises(type(first.value)) as second:
        handle.wait()
    assert str(second.value) == str(first.value)


@pytest.mark.ranks(2)
def test_waiting_again_after_an_interrupt(rank, monkeypatch):
    x = leaf(random((4,), rank))
    real, here, interrupted = Future.result, threading.get_ident(), []

    def interrupt_once(future, *args):
        if not interrupted and threading.get_ident() == here:
            interrupted.append(True)
            raise KeyboardInterrupt
        return real(future, *args)

    handle = ag.all_reduce(x, async_op=True)
    monkeypatch.setattr(Future, "result", interrupt_once)
    with pytest.raises(KeyboardInterrupt):
        handle.wait()
    y = handle.wait()
    same(y.detach(), random((4,), 0) + random((4,), 1), "the value")
    y.sum().backward()
    same(x.grad, torch.full_like(x, 2.0).detach(), "the gradient")


def interrupt(*_):
    raise KeyboardInterrupt


def interrupt_while_it_waits(handle):
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    with pytest.raises(KeyboardInterrupt):
        handle.wait()
    signal.signal(signal.SIGALRM, before)


def interrupt_at_its_end(handle):
    def forget_and_interrupt(*args, forget=started_calls.forget):
        forget(*args)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(started_calls, "forget", forget_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            handle.wait()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("interrupt_wait", [interrupt_while_it_waits, interrupt_at_its_end])
def test_an_interrupted_wait_keeps_its_place(rank, world, interrupt_wait):
    """Backward runs in one order, also where one rank was interrupted and waited again after a later call."""
    a, b = leaf(random((4,), rank)), leaf(random((4,), 10 + rank))
    dist.barrier()
    time.sleep(2.0 * (rank == 1))
    handle = ag.all_reduce(a, async_op=True)
    if rank == 0:
        interrupt_wait(handle)
    else:
        handle.wait()
    later = ag.all_reduce(b)
    ((rank + 1.0) * handle.wait() + (rank + 10.0) * later).sum().backward()
    same(a.grad, torch.full_like(a, sum(r + 1.0 for r in range(world))).detach(), "the first")
    same(b.grad, torch.full_like(b, sum(r + 10.0 for r in range(world))).detach(), "the second")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_wait_that_is_interrupted_at_its_end(rank, requires_grad, monkeypatch):
    real, interrupted = async_calls.PendingCall.wait, []

    def wait_and_interrupt(pending):
        results = real(pending)
        if not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt
        return results

    monkeypatch.setattr(async_calls.PendingCall, "wait", wait_and_interrupt)
    x = random((4,), rank).requires_grad_(requires_grad)
    handle = ag.all_reduce(x, async_op=True, grad="sum" if requires_grad else "none")
    with pytest.raises(KeyboardInterrupt):
        handle.wait()
    y = handle.wait()
    same(y.detach(), random((4,), 0) + random((4,), 1), "the value")
    if requires_grad:
        y.sum().backward()
        same(x.grad, torch.full_like(x, 2.0).detach(), "the gradient")


@pytest.mark.ranks(3)
def test_a_call_for_which_no_thread_could_be_started_is_not_made(rank, monkeypatch):
    def no_thread(_):
        raise RuntimeError("can't start new thread")

    group, x = dist.new_group(), torch.full((2,), float(rank))
    if rank == 1:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_thread)
            with pytest.raises(RuntimeError, match="new thread"):
                ag.all_reduce(x, group=group, async_op=True)
    assert ag.all_reduce(x, group=group, async_op=True).wait().tolist() == [3.0, 3.0]
    assert ag.all_reduce(x + 1, group=group).tolist() == [6.0, 6.0]
    assert not call_queue.QUEUES.pending


@pytest.mark.ranks(2)
def test_compute_runs_while_the_call_does(rank):
    """The call is held up until the main thread has computed: it could not end if they took turns."""
    computed = threading.Event()
    real = primitives._run

    def held_up(*args):
        assert computed.wait(20), "nothing was computed while the call was pending"
        return real(*args)

    x = leaf(random((4,), rank))
    primitives._run = held_up
    try:
        handle = ag.all_reduce(x, async_op=True)
        middle = x.sin()
        computed.set()
        y = handle.wait() + middle
        computed.clear()
        # Backward: the adjoint starts at wait, sin's own backward runs, then the adjoint is awaited.
        middle.register_hook(lambda _: computed.set())
        y.sum().backward()
    finally:
        primitives._run = real
    same(x.grad, (2 + x.detach().cos()), "the gradient")


@pytest.mark.ranks(3)
def test_in_lockstep_a_handle_nobody_waits_for_takes_part(rank, world):
    x = leaf(random((2,), rank))
    with ag.lockstep() as step:
        a = ag.all_reduce(x, async_op=True)
        b = ag.all_gather(x.sin())
        total = a.wait().sum() if rank != 1 else b.sum()
    step.backward(total)
    xs = [leaf(random((2,), r)) for r in range(world)]
    want = grads(2 * sum(xs).sum() + torch.cat(xs).sin().sum(), xs)[rank]
    same(x.grad, want, "the gradient")


@pytest.mark.ranks(2)
def test_checked_calls_can_be_started(rank, world):
    with ag.checked():
        x = leaf(random((2,), rank))
        y = ag.all_reduce(x, async_op=True).wait()
        y.sum().backward()
        same(x.grad, torch.full_like(x, world).detach(), "the gradient")
        handle = ag.all_reduce(torch.ones(2 + rank), async_op=True)
        with pytest.raises(errors.CollectiveMismatch, match="rank 1"):
            handle.wait()


@pytest.mark.ranks(2)
def test_modes_in_which_a_call_is_done_at_once(rank, world):
    x = random((2,), rank)
    got = torch.func.grad(lambda x: ag.all_reduce(x, async_op=True).wait().sum())(x)
    same(got, torch.full_like(x, world), "the gradient")
    compiled = torch.compile(
        lambda x: ag.all_reduce(x, async_op=True).wait(), backend="aot_eager", fullgraph=True
    )
    same(compiled(x).detach(), ag.all_reduce(x).detach(), "the compiled value")


@pytest.mark.ranks(1, 2)
def test_nothing_is_kept_alive(rank):
    gc.disable()
    try:
        x = leaf(random((2,), rank))
        y = ag.all_reduce(x.exp(), async_op=True).wait()
        loss(y, rank).backward()
        kept = weakref.ref(y)
        del y
        for _ in range(100):
            if kept() is None:
                break
            time.sleep(0.01)
        assert kept() is None
        assert call_queue.QUEUES.pending == 0
    finally:
        gc.enable()


@pytest.mark.ranks(3)
def test_a_pending_call_holds_up_no_other_group(rank):
    """Rank 1 comes to the pending call only after what rank 0 makes behind it."""
    groups = {pair: dist.new_group(pair) for pair in ((0, 1), (0, 2), (1, 2))}
    x = torch.full((3,), rank + 1.0)

    def reduced(*pair, **options):
        return ag.all_reduce(x, group=groups[pair], **options)

    with ag.deadline(15):
        if rank == 0:
            handle = reduced(0, 1, async_op=True)
            found = reduced(0, 2), handle.wait()
        elif rank == 1:
            found = reduced(1, 2), reduced(0, 1)
        else:
            found = reduced(0, 2), reduced(1, 2)
    wanted = {0: (4.0, 3.0), 1: (5.0, 3.0), 2: (4.0, 5.0)}[rank]
    assert [y[0].item() for y in found] == list(wanted)


def in_a_thread(call):
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def check_two_gathers(rank, world, gather):
    """``gather(x, w)`` gives both gathered; ranks may wait for them in different places."""
    n = 4
    pairs = [(random((n,), 2 * r), random((n,), 2 * r + 1)) for r in range(world)]
    x, w = (leaf(t) for t in pairs[rank])

    def weigh(a, b):
        weights = torch.arange(1.0, a.numel() + 1, dtype=a.dtype)
        return (weights * a).sin().sum() + (weights * b).cos().sum()

    weigh(*gather(x, w)).backward()
    whole = [leaf(torch.cat(ts)) for ts in zip(*pairs, strict=True)]
    (world * weigh(*whole)).backward()
    for got, want in zip((x, w), whole, strict=True):
        same(got.grad, want.grad[rank * n : (rank + 1) * n], "the gradient")


@pytest.mark.ranks(2, 3)
def test_a_plain_call_comes_after_those_started_before_it(rank, world):
    """Wherever each rank waits for them: before it or after it."""

    def gather(x, w):
        handle = ag.all_gather(x, sizes="equal", async_op=True)
        a = handle.wait() if rank == 0 else None
        b = ag.all_gather(w, sizes="equal")
        return handle.wait() if a is None else a, b

    check_two_gathers(rank, world, gather)


@pytest.mark.ranks(2, 3)
def test_a_handle_pending_at_a_compiled_call(rank, world):
    """One rank has compiled the plain call: its node was there before the handle could be finished."""
    torch.compiler.reset()
    plain = functools.partial(ag.all_gather, sizes="equal")
    call = torch.compile(plain, backend="aot_eager", fullgraph=True) if rank == 0 else plain

    def gather(x, w):
        handle = ag.all_gather(x, sizes="equal", async_op=True)
        b = call(w)
        return handle.wait(), b

    check_two_gathers(rank, world, gather)


@pytest.mark.ranks(2, 3)
def test_handles_of_two_threads_waited_in_another_order(rank, world):
    def gather(x, w):
        first = in_a_thread(lambda: ag.all_gather(x, sizes="equal", async_op=True))
        second = ag.all_gather(w, sizes="equal", async_op=True)
        for handle in (first, second) if rank == 0 else (second, first):
            handle.wait()
        return first.wait(), second.wait()

    check_two_gathers(rank, world, gather)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_handle_waited_without_grad_keeps_its_gradient(rank, world, mode):
    """And the one started before it."""

    def gather(x, w):
        first = ag.all_gather(x, sizes="equal", async_op=True)
        second = ag.all_gather(w, sizes="equal", async_op=True)
        with mode():
            logged = second.wait().sum().item()
        assert logged == second.wait().sum().item()
        return first.wait(), second.wait()

    check_two_gathers(rank, world, gather)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("where", ["without grad", "in a thread"])
def test_in_lockstep_a_handle_is_tied_where_it_was_started(rank, world, where):
    x = leaf(random((4,), rank))
    with ag.lockstep() as step:
        a = ag.all_gather(x, sizes="equal")
        handle = ag.all_reduce(x.sum(), async_op=True)
        if where == "in a thread":
            total = in_a_thread(handle.wait)
        else:
            with torch.no_grad():
                total = handle.wait()
        b = ag.all_gather(x, sizes="equal")
    step.backward((a.square().sum() + total.sin() + b.cos().sum()) if rank == 0 else None)
    whole = leaf(torch.cat([random((4,), r) for r in range(world)]))
    (whole.square().sum() + whole.sum().sin() + whole.cos().sum()).backward()
    same(x.grad, whole.grad[4 * rank : 4 * rank + 4], "the gradient")


@pytest.mark.ranks(2)
def test_in_lockstep_one_rank_has_waited_and_another_not(rank, world):
    """Before backward, inside the block: both take part, in one order, also in the next derivative."""
    x = leaf(random((4,), rank))
    with ag.lockstep() as step:
        a = ag.all_gather(x.sin(), sizes="equal")
        handle = ag.all_gather(a, sizes="equal", async_op=True)
        if rank == 1:
            handle.wait()
        step.backward(a.square().sum() if rank == 0 else None, create_graph=True)
        first, x.grad = x.grad, None
        step.backward(first.square().sum())
    whole = leaf(torch.cat([random((4,), r) for r in range(world)]))
    (wanted,) = torch.autograd.grad(whole.sin().square().sum(), whole, create_graph=True)
    wanted.square().sum().backward()
    own = slice(4 * rank, 4 * rank + 4)
    same(first.detach(), wanted[own].detach(), "the gradient")
    same(x.grad, whole.grad[own], "the second derivative")


@pytest.mark.ranks(2)
def test_a_handle_waited_for_inside_a_transform_says_so(rank, world):
    x = leaf(random((4,), rank))
    handle = ag.all_reduce(x, async_op=True)
    with pytest.raises(errors.ModeError, match="Wait for it outside"):
        torch.func.grad(lambda y: (handle.wait() * y).sum())(x.detach())
    handle.wait().sum().backward()
    same(x.grad, torch.full_like(x, float(world)).detach(), "the gradient")


def test_a_forked_process_starts_calls_of_its_own():
    ag.all_reduce(torch.ones(2), async_op=True).wait()
    child = os.fork()
    if child == 0:
        done = ag.all_reduce(torch.ones(2), async_op=True).wait().tolist() == [1.0, 1.0]
        os._exit(0 if done else 1)
    until = time.monotonic() + 10
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < until:
        time.sleep(0.05)
    if ended[0] == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended == (child, 0)
