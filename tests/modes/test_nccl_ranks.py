"""Several real NCCL ranks on one GPU, where such an NCCL is found: values and gradients are exact.

NCCL from 2.30 on lets ranks share a GPU if NCCL_MULTI_RANK_GPU_ENABLE=1 is set.
"""

import os

import pytest
import torch
import torch.distributed as dist

import allgrad as ag
import orders
import reference
from allgrad.testing import run_ranks
from counting import Counted
from exactness import random
from losses.pairs import LOSSES, PAIRS, batch

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1",
    reason="needs a GPU that NCCL ranks may share",
)

ROWS = (2, 0, 3, 1)
# name: the pieces, the call on a rank, the reference over all pieces.
CALLS = {
    "all_gather": ("ragged", ag.all_gather, reference.all_gather),
    "all_gather, equal": ("equal", lambda x: ag.all_gather(x, sizes="equal"), reference.all_gather),
    "all_reduce": ("equal", ag.all_reduce, reference.all_reduce),
    "all_reduce, max": (
        "equal",
        lambda x: ag.all_reduce(x, "max"),
        lambda xs: reference.all_reduce(xs, "max"),
    ),
    "reduce_scatter": ("equal", ag.reduce_scatter, reference.reduce_scatter),
    "all_to_all": ("equal", ag.all_to_all, reference.all_to_all),
    "broadcast": ("equal", lambda x: ag.broadcast(x, 1), lambda xs: reference.broadcast(xs, 1)),
    "reduce": ("equal", lambda x: ag.reduce(x, 1), lambda xs: reference.reduce(xs, 1)),
    "gather": ("ragged", lambda x: ag.gather(x, 1), lambda xs: reference.gather(xs, 1)),
    "shift": ("ragged", ag.shift, reference.shift),
    "async": ("ragged", lambda x: ag.all_gather(x, async_op=True).wait(), reference.all_gather),
    "scan": ("equal", ag.scan, reference.scan),
}


def rows(kind, rank, world):
    return ROWS[rank] if kind == "ragged" else world


def weights(y, r):
    return torch.linspace(1, 2 + r, y.numel(), dtype=y.dtype, device=y.device).view(y.shape)


def on_ranks(name):
    kind, call, _ = CALLS[name]
    rank, world = dist.get_rank(), dist.get_world_size()
    x = random((rows(kind, rank, world), 3), rank).cuda().requires_grad_()
    y = call(x)
    (g,) = torch.autograd.grad((weights(y, rank) * y).sin().sum(), x, create_graph=True)
    (h,) = torch.autograd.grad((g * g).sum(), x)
    return y.detach().cpu(), g.detach().cpu(), h.cpu()


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", CALLS)
def test_values_and_two_derivatives(name, world):
    kind, _, wanted = CALLS[name]
    xs = [random((rows(kind, r, world), 3), r).requires_grad_() for r in range(world)]
    ys = wanted(xs)
    total = sum((weights(y, r) * y).sin().sum() for r, y in enumerate(ys))
    unused = {"allow_unused": True, "materialize_grads": True}
    gs = torch.autograd.grad(total, xs, create_graph=True, **unused)
    hs = torch.autograd.grad(sum((g * g).sum() for g in gs), xs, **unused)
    found = run_ranks(on_ranks, world, name, backend="nccl", timeout=100)
    for got, *want in zip(found, ys, gs, hs, strict=True):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b.detach(), rtol=1e-12, atol=1e-12)


def compiled_beside_eager():
    rank = dist.get_rank()
    x = random((ROWS[rank], 3), rank).cuda().requires_grad_()
    call = torch.compile(ag.all_gather, fullgraph=True, backend="aot_eager")
    y = call(x) if rank else ag.all_gather(x)
    (g,) = torch.autograd.grad((weights(y, rank) * y).sin().sum(), x)
    return y.detach().cpu(), g.cpu()


@pytest.mark.parametrize("world", [2, 4])
def test_compiled_ranks_beside_an_eager_one(world):
    xs = [random((ROWS[r], 3), r).requires_grad_() for r in range(world)]
    ys = reference.all_gather(xs)
    gs = torch.autograd.grad(sum((weights(y, r) * y).sin().sum() for r, y in enumerate(ys)), xs)
    found = run_ranks(compiled_beside_eager, world, backend="nccl", timeout=100)
    for (got_y, got_g), y, g in zip(found, ys, gs, strict=True):
        torch.testing.assert_close(got_y, y.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(got_g, g, rtol=1e-12, atol=1e-12)


def scatter_from_none():
    rank = dist.get_rank()
    whole = random((5, 2), 9).cuda().requires_grad_()
    with ag.checked(), ag.lockstep() as step:
        y = ag.scatter(whole if rank == 1 else None, 1)
    step.backward(y.sum())
    return y.detach().cpu(), whole.grad if whole.grad is None else whole.grad.cpu()


@pytest.mark.parametrize("world", [2, 4])
def test_scatter_needs_no_tensor_off_src(world):
    found = run_ranks(scatter_from_none, world, backend="nccl", timeout=100)
    assert torch.equal(torch.cat([y for y, _ in found]), random((5, 2), 9))
    assert torch.equal(found[1][1], torch.ones(5, 2, dtype=torch.float64))


def in_one_order(seeds):
    rank, world = dist.get_rank(), dist.get_world_size()
    for seed in seeds:
        got = orders.on_rank(seed, rank, orders.Threads(), ("main",), "cuda")
        want = orders.in_one_process(seed, world, ("main",))[rank]
        # Chains of sines make up to 2e-10 of the last bit of an input, and a device has sines of its
        # own. Two calls that meet each other change the first digits.
        torch.testing.assert_close(got, list(want), rtol=1e-9, atol=1e-9)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("world", [2, 4])
def test_one_order_of_second_derivatives(world):
    """Autograd's own thread records them; each rank has made another number of nodes before."""
    seeds = range(200 if os.environ.get("ALLGRAD_ALL") else 10)
    run_ranks(in_one_order, world, seeds, backend="nccl", timeout=380)


def with_derivatives(loss, features, rows):
    """Value, gradients and second derivatives by the features."""
    first = torch.autograd.grad(loss, features, create_graph=True)
    # A coefficient for each row of all ranks, so that ranks differ.
    again = sum((rows.cos()[:, None] * g.sin()).sum() for g in first)
    return loss, *first, *torch.autograd.grad(again, features)


def loss_on_ranks(name, counts, options):
    rank, (loss, _, more) = dist.get_rank(), LOSSES[name]
    query, key, *numbers = (x.detach().cuda() for x in batch(name, counts, rank))
    features = query.requires_grad_(), key.requires_grad_()
    rows = torch.arange(counts[rank]).cuda().double() + sum(counts[:rank])
    with Counted() as calls:
        loss(*features, *numbers, **more, **options).backward()
    found = with_derivatives(loss(*features, *numbers, **more, **options), features, rows)
    return [x.detach().cpu() for x in found], len(calls)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("name", ["clip", "siglip", "info_nce"])
def test_losses_and_two_derivatives(name, ring, world):
    for kind in ("equal", "ragged"):
        counts = PAIRS[kind][:world]
        query, key, *numbers = (x.detach() for x in batch(name, counts))
        features = query.requires_grad_(), key.requires_grad_()
        rows = torch.arange(sum(counts)).double()
        value, *want = with_derivatives(
            world * LOSSES[name][1](*features, *numbers), features, rows
        )
        options = {"sizes": counts, "ring": ring}
        found = run_ranks(loss_on_ranks, world, name, counts, options, backend="nccl", timeout=100)
        for rank, ((got, *more), calls) in enumerate(found):
            assert calls == 3 if not ring else calls <= 2 + 3 * world
            torch.testing.assert_close(got, value.detach() / world, rtol=1e-10, atol=1e-12)
            for x, y in zip(more, want, strict=True):
                own = y.detach().split(list(counts))[rank]
                torch.testing.assert_close(x, own, rtol=1e-10, atol=1e-12)


def changing_batch(name, counts, step, rank=None):
    """Another batch in each step."""
    return [(x.detach() * (1 + step / 8)).requires_grad_() for x in batch(name, counts, rank)]


def loop_on_ranks(name, counts):
    """Gradients of each step of a loop that finds the sizes out, and its calls."""
    rank, (loss, _, more) = dist.get_rank(), LOSSES[name]
    found = []
    for step, held in enumerate(counts):
        made = changing_batch(name, held, step, rank)
        inputs = [x.detach().cuda().requires_grad_() for x in made]
        with Counted() as calls:
            value = loss(*inputs, **more)
            value.backward()
        found.append(([x.detach().cpu() for x in (value, *(y.grad for y in inputs))], len(calls)))
    return found


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", ["clip", "siglip", "info_nce"])
def test_a_loop_of_losses_that_find_sizes_out(name, world):
    """From the fourth equal step on, what the ranks compare travels with the keys; then one rank changes, then all."""
    equal, ragged = PAIRS["equal"][:world], PAIRS["ragged"][:world]
    counts = (*[equal] * 5, (*equal[:-1], 1), *[equal] * 4, ragged, equal)
    found = run_ranks(loop_on_ranks, world, name, counts, backend="nccl", timeout=100)
    for step, held in enumerate(counts):
        inputs = changing_batch(name, held, step)
        LOSSES[name][1](*inputs).backward()
        (value, *_), _ = found[0][step]
        want = LOSSES[name][1](*(x.detach() for x in inputs))
        torch.testing.assert_close(value, want, rtol=1e-10, atol=1e-12)
        for rank, by_step in enumerate(found):
            (_, *gradients), calls = by_step[step]
            assert calls == 3 or step not in {3, 4}
            for got, x in zip(gradients[:2], inputs[:2], strict=True):
                own = world * x.grad.split(list(held))[rank]
                torch.testing.assert_close(got, own, rtol=1e-10, atol=1e-12)
        for i, x in enumerate(inputs[2:]):
            parts = sum(by_step[step][0][3 + i] for by_step in found) / world
            torch.testing.assert_close(parts, x.grad, rtol=1e-10, atol=1e-12)
