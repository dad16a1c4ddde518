"""What surrounds a collective in real programs."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.checkpoint import checkpoint

import allgrad as ag
from allgrad import module_state
from allgrad import nn as agnn
from allgrad._wire import primitives as wire
from allgrad.errors import ModeError
from allgrad.losses import KeyQueue, clip_loss, cross_entropy, multiple_negatives_loss
from allgrad.testing import gradcheck
from calls import CALLS, Place
from counting import WIRE_CALLS, Counted
from exactness import grads, leaf, random, same


@pytest.mark.ranks(2, 3)
def test_under_autocast_the_dtype_of_the_tensor_travels(rank):
    """Autocast casts what goes into matmuls; a collective sends what it is given."""
    sent = []
    real = {name: getattr(wire, name) for name in WIRE_CALLS}
    for name in WIRE_CALLS:
        setattr(
            wire,
            name,
            lambda g, x, *a, name=name, **b: (sent.append(x.dtype), real[name](g, x, *a, **b))[1],
        )
    try:
        layer = torch.nn.Linear(4, 4)
        x = torch.randn(2, 4, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            h = layer(x)
            assert h.dtype == torch.bfloat16
            y = ag.all_gather(h, sizes="equal")
            z = ag.all_reduce(x)
        assert (y.dtype, z.dtype) == (torch.bfloat16, torch.float32)
        assert sent == [torch.bfloat16, torch.float32]
        sent.clear()
        (y.float().sum() + z.sum()).backward()
        assert sorted(sent, key=str) == [torch.bfloat16, torch.float32]
        assert x.grad.dtype == torch.float32
    finally:
        for name, call in real.items():
            setattr(wire, name, call)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(rank, world, reentrant):
    """The forward runs twice, on every rank alike; the gradient is the same."""

    def block(x):
        y = ag.all_gather(x.sin())
        return ag.reduce_scatter(y.tanh(), op="max", sizes=(2,) * world) * x

    x, plain = leaf(random((2, 3), rank)), leaf(random((2, 3), rank))
    with Counted() as calls:
        y = checkpoint(block, x, use_reentrant=reentrant)
        once = len(calls)
        y.square().sum().backward()
    want = block(plain)
    want.square().sum().backward()
    same(y.detach(), want.detach(), "the value")
    same(x.grad, plain.grad, "the gradient")
    assert len(calls) > 2 * once  # forward, forward again, backward


@pytest.mark.one_in(8)
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", CALLS)
def test_inference_mode_and_no_grad(rank, world, name):
    call = CALLS[name]
    shapes = call.shapes(world)
    x = leaf(random(shapes[rank % len(shapes)], rank % len(shapes)))
    want = call.run(Place(rank, world), x).detach()
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            got = call.run(Place(rank, world), x)
        assert not got.requires_grad
        assert torch.equal(got, want)


@pytest.mark.ranks(3)
def test_another_default_device(rank, world):
    """What the ranks tell each other stays on the host, where their tensors are."""
    place, group = Place(rank, world), dist.new_group()
    x, y = random((2 * rank, 3), rank), random((2 * rank, 3), rank + 10)
    ids = torch.arange(2 * rank)
    pieces = []
    for call in CALLS.values():
        shapes = call.shapes(world)
        pieces.append(random(shapes[rank % len(shapes)], rank % len(shapes)))

    def results():
        found = [call.run(place, x) for call, x in zip(CALLS.values(), pieces, strict=True)]
        found += ag.all_gather([x, ids], group=group)
        with ag.checked():
            found.append(ag.all_to_all(x, group=group))
        z = leaf(x)
        with ag.lockstep() as step:
            first = ag.losses.clip_loss(z, y, 2.0)
        step.backward(first)
        total = first.detach()
        for _ in range(3):
            total = total + ag.losses.supcon_loss(z, y, 2.0, ids, ids)
        total.backward()
        return [*found, total.detach(), z.grad]

    wanted = results()
    torch.set_default_device("meta")
    try:
        group = dist.new_group()  # of which nothing is known yet
        found = results()
    finally:
        torch.set_default_device(None)
    for got, want in zip(found, wanted, strict=True):
        assert torch.equal(got, want)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", CALLS)
def test_fake_and_meta_tensors_have_shapes_and_send_nothing(name):
    """One process of a world of three, whose other ranks are not there."""
    from allgrad.testing import run_ranks

    run_ranks(shapes_alone, 3, name)


def shapes_alone(name):
    rank, world = dist.get_rank(), dist.get_world_size()
    call = CALLS[name]
    shapes = call.shapes(world)
    x = leaf(random(shapes[rank % len(shapes)], 0))
    at = Place(rank, world, sizes_given=True)
    want = call.run(at, x)
    if rank == 1:  # alone from here on
        with FakeTensorMode() as mode:
            fake = mode.from_tensor(x)
            y = call.run(at, fake)
            assert isinstance(y, FakeTensor)
            assert (y.shape, y.dtype) == (want.shape, want.dtype)
            if y.requires_grad:
                (g,) = torch.autograd.grad(y.sum(), fake)
                assert g.shape == x.shape
        y = call.run(at, x.detach().to("meta").requires_grad_())
        assert y.is_meta
        assert (y.shape, y.dtype) == (want.shape, want.dtype)
        assert y.requires_grad == want.requires_grad


@pytest.mark.ranks(2)
def test_sizes_cannot_be_found_out_from_shapes_alone(rank):
    if rank == 0:
        for x in (torch.empty(2, 2, device="meta"), FakeTensorMode().from_tensor(torch.ones(2, 2))):
            for call in (ag.all_gather, ag.gather, ag.shift, ag.all_to_all, ag.scatter):
                with pytest.raises(ModeError, match=r"cannot tell each other their sizes\.\nGive"):
                    call(x)
            assert ag.reduce_scatter(x).shape == (1, 2)


@pytest.mark.ranks(2, 3)
@pytest.mark.filterwarnings("ignore")
def test_detect_anomaly(rank, world):
    """No fault is seen where there is none; one is seen, on every rank, where there is."""
    x = leaf(random((3,), rank))
    with torch.autograd.set_detect_anomaly(True):
        (g,) = grads(ag.all_gather(x).square().sum(), [x])
        same(g, 2 * world * x.detach(), "a gradient without a fault")
        y = ag.all_reduce(leaf(torch.zeros(3)).sqrt())
        with pytest.raises(RuntimeError, match=r"SqrtBackward0.*returned nan"):
            (y * 0).sum().backward()


@pytest.mark.ranks(2, 3)
def test_hooks_on_gradients(rank, world):
    """Tensor hooks see, and may change, the gradient on either side of a collective."""
    x = leaf(random((3,), rank))
    seen = []
    y = ag.all_reduce(x)
    y.register_hook(lambda g: (seen.append(("result", g.clone())), g * 2)[1])
    x.register_hook(lambda g: seen.append(("piece", g.clone())))
    x.register_post_accumulate_grad_hook(lambda t: seen.append(("leaf", t.grad.clone())))
    (y * (rank + 1)).sum().backward()
    total = torch.full((3,), 2.0 * sum(range(1, world + 1))).double()
    assert [name for name, _ in seen] == ["result", "piece", "leaf"]
    same(seen[0][1], torch.full((3,), rank + 1.0).double(), "the result's gradient")
    same(seen[1][1], total, "the piece's gradient")
    same(x.grad, total, "the accumulated gradient")


@pytest.mark.ranks(2, 3)
def test_node_hooks_and_retained_graphs(rank, world):
    x = leaf(random((2, 2), rank))
    y = ag.all_gather(x)
    ran = []
    y.grad_fn.register_hook(lambda *_: ran.append("after"))
    y.grad_fn.register_prehook(lambda _: ran.append("before"))
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert ran == ["before", "after"] * 2
    same(x.grad, torch.full((2, 2), 2.0 * world).double(), "the gradient of two backwards")


def layers_and_losses(rank, group):
    """Functions of one rank's rows; they have features 0 to 3."""
    ids = torch.arange(rank + 1)
    hidden = random((1, 4), 9)  # the same on every rank
    queue = KeyQueue(5, 4, ids=True, group=group, dtype=torch.float64)
    norm, first = (
        layer.double()
        for layer in (
            agnn.SyncBatchNorm(4, group=group),
            agnn.ColumnParallelLinear(4, 6, group=group),
        )
    )

    def experts(x, capacity):
        sent = agnn.dispatch(x, ids % 3, experts=3, capacity=capacity, group=group)
        return agnn.combine(sent.tokens.sin(), sent)

    def queued(x):
        queue.push(x, ids)
        return multiple_negatives_loss(x, x.sin(), 2.0, queue=queue, ids=ids, group=group)

    def step_by_step(x):
        with ag.lockstep():
            return ag.all_gather(x, group=group)

    def asynchronous(x):
        return ag.all_gather(x, group=group, async_op=True).wait()

    return {
        "clip_loss": lambda x: clip_loss(x, x.sin(), 2.0, group=group),
        "cross_entropy": lambda x: cross_entropy(hidden, x, ids[:1], group=group),
        "a queue": queued,
        "batch norm": norm,
        "a parallel linear": lambda x: first(x[:1] * 0 + 1),
        "attention": lambda x: agnn.ring_attention(x, x, x, causal=True, group=group),
        "experts": lambda x: experts(x, None),
        "experts with room for two": lambda x: experts(x, 2),
        "lockstep": step_by_step,
        "an async call": asynchronous,
        "join": lambda x: next(iter(ag.join([x], group=group)))[0],
        "max": lambda x: ag.all_reduce(x[:1], "max", group=group),
    }


@pytest.mark.ranks(3)
@pytest.mark.parametrize("check", [False, True])
def test_the_default_device_is_of_no_account(rank, world, check):
    """A program may call torch.set_default_device; messages between ranks go where their tensors are."""
    group = dist.new_group()  # which has not exchanged anything yet
    for name, run in layers_and_losses(rank, group).items():
        found = []
        for device in ("meta", "cpu"):
            torch.manual_seed(0)
            x = leaf(random((rank + 1, 4), rank))
            with torch.device(device), ag.checked() if check else contextlib.nullcontext():
                y = run(x)
                y.square().sum().backward()
            found.append((y.detach(), x.grad))
        if name != "a queue":  # it has more keys the second time
            torch.testing.assert_close(*found, msg=lambda text, name=name: f"{name}: {text}")
        assert found[0][0].is_cpu, name
    x = leaf(random((2,), rank))
    with torch.device("meta"):
        module_state.sync(torch.nn.Linear(2, 2, device="cpu"), group=group)
        assert gradcheck(lambda x: ag.all_gather(x.sin(), group=group), x)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("call", [ag.scan, lambda x, op: ag.reduce(x, 0, op)])
def test_product_of_16_bits_under_autocast_to_other_16_bits(rank, call):
    """A rank that has one factor multiplies it by one: not with an op that autocast refuses."""
    x = torch.full((4,), rank + 2.0, dtype=torch.half, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = call(x, "prod")
        y.sum().backward()
    want = leaf(torch.tensor([2.0, 3.0]))
    scanned = want.prod() + (want[0] if call is ag.scan else 0)
    (gradient,) = torch.autograd.grad(scanned, want)
    assert x.grad.tolist() == [gradient[rank].item()] * 4
    assert y.dtype == x.grad.dtype == torch.half
