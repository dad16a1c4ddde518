"""Compiled and eager calls send the same messages; tracing sends none; safety tools hold in graphs."""

import os
import time

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
from torch import func
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import allgrad as ag
from allgrad._core.torch_internals import FINDS_LENGTHS_IN_TRANSFORMS
from allgrad.errors import CollectiveMismatch, RankLate
from allgrad.nn import SyncBatchNorm
from allgrad.testing import run_ranks
from counting import Counted
from exactness import leaf, random, same


def compiled(fn, **options):
    torch._dynamo.reset()
    return torch.compile(fn, **{"fullgraph": True, "backend": "aot_eager", **options})


# ---- the same messages --------------------------------------------------------------------------


def step(x, weight):
    """A ragged gather, a count that is a constant of the graph, a mean, and an unused result."""
    everyone = ag.all_gather(x.sin())
    count = ag.all_reduce(torch.tensor(float(len(x)), dtype=x.dtype), grad="none")
    ag.all_reduce(x.sum())
    mean = ag.all_reduce(x.sum(0)) / count
    return weight * everyone.square().sum() + mean.cos().sum()


def in_one_process(pieces):
    """The sum of all ranks' losses by each rank's piece."""
    pieces = [leaf(x) for x in pieces]
    everyone = torch.cat([x.sin() for x in pieces])
    mean = torch.cat(pieces).mean(0)
    weights = sum(range(1, len(pieces) + 1))
    loss = weights * everyone.square().sum() + len(pieces) * mean.cos().sum()
    return torch.autograd.grad(loss, pieces)


STEPS = 100 if os.environ.get("ALLGRAD_ALL") else 15  # TorchDynamo gives up after 8


@pytest.mark.timeout(400)
@pytest.mark.ranks(3, timeout=380)
def test_eager_compiled_and_recompiling_ranks_train_together(rank, world):
    """Rank 0 is eager, rank 1 compiled, rank 2 compiles anew until TorchDynamo falls back to eager."""
    run = step
    if rank:
        run = compiled(step, fullgraph=False, dynamic=rank == 1)
    for i in range(STEPS):
        sizes = (2 + i % 3, 3, 2 + i)
        pieces = [random((sizes[r], 2), 100 * i + r) for r in range(world)]
        x = leaf(pieces[rank])
        run(x, rank + 1).backward()
        same(x.grad, in_one_process(pieces)[rank], f"the gradient of step {i}")


@pytest.mark.ranks(2)
def test_same_wire_calls_as_eager(rank):
    """An unused result is sent, equal calls are not merged, and the order is that of the program."""

    def run(x):
        ag.all_gather(x * 2)
        y = ag.all_reduce(x) + ag.all_reduce(x)
        return y * ag.broadcast(x).sum() + ag.reduce_scatter(ag.all_gather(x)) * ag.shift(x)

    x, traced = leaf(random((2, 2), rank)), compiled(run)
    for fn in (traced, run):
        fn(x).sum().backward()
    sent = []
    for fn in (traced, run):
        with Counted() as calls:
            y = fn(x)
            forward = list(calls)
            y.sum().backward()
        sent.append((forward, calls[len(forward) :]))
    assert sent[0] == sent[1]
    assert len(sent[0][0]) > 8


def compiled_in_two_worlds():
    rank, traced = dist.get_rank(), compiled(lambda x: ag.all_reduce(x).sin())
    store, found = dist.group.WORLD.get_group_store(), []
    for world in ("first", "second"):
        dist.destroy_process_group()
        again = dist.PrefixStore(world, store)
        dist.init_process_group("gloo", store=again, rank=rank, world_size=2)
        x = leaf(torch.full((2,), 1.0 + rank))
        traced(x).sum().backward()
        found.append(x.grad)
    dist.destroy_process_group()
    return found


def test_graph_runs_on_a_new_world():
    """Whose group has the name of the one before."""
    for found in run_ranks(compiled_in_two_worlds, 2, timeout=100):
        for g in found:
            same(g, 2 * torch.full((2,), 3.0).cos(), "the gradient")


NUMBERS = {
    "all_gather": lambda x, n: ag.all_gather(x, n, sizes="equal"),
    "reduce_scatter": ag.reduce_scatter,
    "all_to_all": ag.all_to_all,
    "broadcast": ag.broadcast,
    "reduce": ag.reduce,
    "gather": lambda x, n: ag.gather(x, n, 1 - n),
    "scatter": lambda x, n: ag.scatter(x, n, 1 - n),
    "permute": lambda x, n: ag.permute(x, [(n, 1 - n)], dim=n),
    "shift": lambda x, n: ag.shift(x, n, dim=n),
    "split": ag.split,
}


@pytest.mark.timeout(300)
@pytest.mark.one_in(5)
@pytest.mark.ranks(2, timeout=280)
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_vary_from_call_to_call(rank, name):
    """A dim, src, dst, offset or pairs that the caller gives: each makes a graph of its own, and rank 1 is eager."""

    def run(x, n):
        return NUMBERS[name](x.sin(), n).square().sum() * (rank + 1)

    given = run if rank else compiled(run)
    x = random((2, 4), rank)
    for n in (0, 1, 0):
        mine, wanted = leaf(x), leaf(x)
        given(mine, n).backward()
        run(wanted, n).backward()
        same(mine.grad, wanted.grad, f"the gradient for {n}")


# ---- sizes --------------------------------------------------------------------------------------


@pytest.mark.timeout(300)
@pytest.mark.ranks(2, timeout=280)
@pytest.mark.parametrize("found", [False, True], ids=["sizes given", "sizes found"])
def test_one_graph_for_all_sizes(rank, world, found):
    """Ten steps of ragged training: the first sizes, then all others."""

    def run(x, sizes):
        y = ag.all_gather(x.sin(), sizes=sizes)
        z = ag.shift(x, sizes=sizes)
        return (y * y.sum()).sum() + z.cos().sum()

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    traced = compiled(run, backend=counter)
    for i in range(10):
        sizes = [2 + (i + 3 * r) % 7 for r in range(world)]
        x = random((sizes[rank], 2), 10 * i + rank)
        mine, wanted = leaf(x), leaf(x)
        given = None if found else sizes
        traced(mine, given).backward()
        run(wanted, given).backward()
        same(mine.grad, wanted.grad, f"the gradient of step {i}")
    assert counter.frame_count <= 2


@pytest.mark.ranks(2)
@pytest.mark.skipif(not FINDS_LENGTHS_IN_TRANSFORMS, reason="a ModeError before torch 2.13")
@pytest.mark.parametrize("dynamic", [True, None])
def test_sizes_found_to_second_order(rank, dynamic):
    def slope(x):
        return func.grad(lambda x: ag.all_gather(ag.all_to_all(x).sin()).square().sum())(x)

    x = random((3 + rank, 2), rank)
    mine, wanted = leaf(x), leaf(x)
    compiled(slope, dynamic=dynamic)(mine).square().sum().backward()
    slope(wanted).square().sum().backward()
    same(mine.grad, wanted.grad, "the gradient of the slope")


# ---- tracing sends nothing ----------------------------------------------------------------------


class Traced(Exception):
    """Raised instead of running what was traced."""


def stop(*_):
    def run(*_):
        raise Traced

    return run


def by_compile(fn, x):
    with pytest.raises(Traced):
        compiled(fn, backend=aot_autograd(fw_compiler=stop))(x)


def by_fake_tensors(fn, x):
    with FakeTensorMode() as mode:
        fn(mode.from_tensor(x))


class Module(torch.nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.forward = fn


def plain(x):
    y = ag.all_gather(x.sin(), sizes="equal")
    return ag.all_reduce(y.sum(0)).sum()


def with_constants(x):
    count = ag.all_reduce(torch.tensor(float(len(x))), grad="none")
    ones = ag.all_gather(torch.tensor([1.0, 2.0]), sizes="equal")
    return plain(x) / count + ag.broadcast(torch.tensor(3.0)) + ones.sum()


def with_sizes_found(x):
    return ag.all_gather(x).sum() + ag.all_to_all(x).sum() + ag.reduce_scatter(x).sum()


TRACERS = {
    "torch.compile": by_compile,
    "torch.compile of func.grad": lambda fn, x: by_compile(func.grad(fn), x),
    "torch.compile of func.vmap": lambda fn, x: by_compile(
        lambda x: func.vmap(fn)(torch.stack([x, x])), x
    ),
    "torch.compile of func.jvp": lambda fn, x: by_compile(
        lambda x: func.jvp(fn, (x,), (torch.ones_like(x),))[1], x
    ),
    "torch.export, strict": lambda fn, x: torch.export.export(Module(fn), (x,), strict=True),
    "torch.export, not strict": lambda fn, x: torch.export.export(Module(fn), (x,), strict=False),
    "make_fx": lambda fn, x: make_fx(fn, tracing_mode="fake")(x),
    "fake tensors": by_fake_tensors,
    "meta tensors": lambda fn, x: fn(x.to("meta").requires_grad_()).sum().backward(),
    "func.grad of meta tensors": lambda fn, x: func.grad(fn)(x.to("meta")),
}
CONSTANTS_ARE_REAL = {"meta tensors", "func.grad of meta tensors"}
FINDS_SIZES = ("torch.compile", "torch.export, strict", "torch.export, not strict")


@pytest.mark.timeout(300)
def test_tracing_sends_nothing():
    table = run_ranks(messages_while_tracing, 2, timeout=280)[0]
    assert set(table.values()) == {0}
    assert len(table) == 2 * len(TRACERS) - len(CONSTANTS_ARE_REAL) + len(FINDS_SIZES)


def messages_while_tracing():
    """Rank 0 traces; rank 1 is not there, so that a message would also end in a hang."""
    table = {}
    if dist.get_rank() == 0:
        for name, trace in TRACERS.items():
            fns = [plain] if name in CONSTANTS_ARE_REAL else [plain, with_constants]
            for fn in fns + [with_sizes_found] * (name in FINDS_SIZES):
                with Counted() as calls, ag.deadline(5):
                    trace(fn, torch.ones(4, 2))
                table[f"{name}, {fn.__name__}"] = len(calls)
    return table


# ---- safety tools -------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_checked_names_the_rank_in_a_graph(rank):
    traced = compiled(ag.all_reduce, dynamic=True)
    traced(torch.ones(2))
    with ag.checked(), pytest.raises(CollectiveMismatch, match=r"rank 1: .*\(4\).*<- another"):
        traced(torch.ones(3 + rank))
    same(traced(torch.ones(3)), torch.full((3,), 2.0), "a call afterwards")


@pytest.mark.ranks(2)
def test_checked_with_one_rank_compiled(rank):
    """Forward, backward, and in an eager call after them: the same calls from the same lines."""

    def run(x):
        y = ag.all_gather(x.sin())
        return ag.all_reduce({"a": y.sum(0), "b": y.sum()})["a"].sum()

    fn = compiled(run) if rank == 0 else run
    x = leaf(random((2 + rank, 2), rank))
    with ag.checked():
        fn(x).backward()
        ag.all_reduce(x.sum()).backward()
    first = x.grad.clone()
    x.grad = None
    run(x).backward()
    ag.all_reduce(x.sum()).backward()
    same(first, x.grad, "the gradient")


@pytest.mark.ranks(2)
def test_checked_layer_called_from_several_lines_with_one_rank_compiled(rank):
    """The graph has none of the user's lines: it has that of its first call no longer in the second."""
    layer = SyncBatchNorm(3)
    run = compiled(layer) if rank else layer
    x = leaf(random((2, 3), rank).float())
    with ag.checked():
        first = run(x)
        second = run(x)
        (first + second).sum().backward()
    lines = [
        lambda: run(x),
        lambda: run(x),
    ]
    with ag.checked(), pytest.raises(CollectiveMismatch, match="<- another line"):
        lines[rank]()


@pytest.mark.ranks(2)
def test_checked_large_reduction_with_one_rank_compiled(rank):
    """Its nodes run on vectors; the number of elements is compared all the same."""

    def run(x):
        return ag.all_reduce(x, "max").square().sum()

    fn, both = compiled(run) if rank == 0 else run, [random((200, 100), r) for r in range(2)]
    x = leaf(both[rank])
    with ag.checked():
        fn(x).backward()
    highest = torch.maximum(*both)
    same(x.grad, 4 * highest * (x == highest), "the gradient")
    with ag.checked(), pytest.raises(CollectiveMismatch, match="10000 from rank 1, which sends"):
        fn(random((200, 100 + 2 * rank), 0))


def late_rank():
    rank, traced = dist.get_rank(), compiled(ag.all_reduce)
    traced(torch.ones(2))
    dist.barrier()
    began, ended = time.monotonic(), None
    with ag.deadline(2):
        if rank == 1:
            time.sleep(8)
        else:
            with pytest.raises(RankLate, match="rank 1 is late: not here within 2 s"):
                traced(torch.ones(2))
            ended = time.monotonic() - began
    dist.destroy_process_group()
    return ended


@pytest.mark.timeout(120)
def test_deadline_holds_in_a_graph():
    assert run_ranks(late_rank, 2, timeout=100)[0] < 8


@pytest.mark.ranks(2)
def test_lockstep_around_a_compiled_function(rank):
    """Collectives leave the graph and run in order; under fullgraph the reason is told."""

    def run(x):
        largest = ag.all_reduce(x, op="max")
        return ag.all_reduce(x.sin()).cos() + ag.all_gather(x).sum() + largest

    gradients = []
    for fn in (compiled(run, fullgraph=False), run):
        x = leaf(random((3,), rank))
        with ag.lockstep() as block:
            y = fn(x)
        block.backward(y.sum() if rank else None)
        gradients.append(x.grad)
    same(*gradients, "the gradient")
    with ag.lockstep(), pytest.raises(Exception, match="lockstep orders collectives in eager"):
        compiled(run)(leaf(torch.ones(3)))


@pytest.mark.ranks(2)
def test_blocks_inside_a_compiled_function(rank):
    """They hold, for the function leaves the graph there; under fullgraph they raise."""
    for block in (ag.checked, ag.lockstep, lambda: ag.deadline(50)):

        def run(x, block=block):
            with block():
                return ag.all_reduce(x)

        same(compiled(run, fullgraph=False)(torch.ones(2)), torch.full((2,), 2.0), "the value")
        with pytest.raises(torch._dynamo.exc.Unsupported, match="cannot be compiled"):
            compiled(run)(torch.ones(2))


@pytest.mark.ranks(2)
def test_second_derivative_of_a_compiled_function(rank, world):
    """create_graph=True is refused by torch; torch.func.grad inside the compiled function is exact."""

    def run(x):
        return ag.all_reduce(x.sin()).square().sum()

    def penalty(x):
        return func.grad(run)(x).square().sum()

    x = leaf(random((3,), rank))
    (g,) = torch.autograd.grad(compiled(run)(x), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        g.sum().backward()
    compiled(penalty)(x).backward()
    leaves = [leaf(random((3,), r)) for r in range(world)]
    total = world * sum(t.sin() for t in leaves).square().sum()
    first = torch.autograd.grad(total, leaves, create_graph=True)
    want = torch.autograd.grad(sum(t.square().sum() for t in first), leaves)
    same(x.grad, want[rank], "the gradient of the penalty")
