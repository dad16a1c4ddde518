"""What surrounds a collective in real programs."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import allgrad as ag
from counting import Counted
from exactness import grads, leaf, loss, random, same


@pytest.mark.ranks(2)
def test_under_autocast_the_dtype_of_the_tensor_travels(rank, world):
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5)
    with torch.autocast("cpu", torch.bfloat16):
        assert ag.all_gather(x).dtype == torch.float32  # no cast of its own
        y = ag.all_gather(x @ w)
        assert y.dtype == torch.bfloat16  # what the product gave
        assert ag.all_reduce(x, "logsumexp").dtype == torch.float32
    y.float().sum().backward()
    want = world * torch.ones(3, 5).to(torch.bfloat16).float() @ w.to(torch.bfloat16).float().T
    torch.testing.assert_close(x.grad, want, rtol=2e-2, atol=2e-2)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(rank, world, reentrant):
    def part(x):
        return ag.reduce_scatter(ag.all_gather(x.sin()).exp().square(), op="max")

    x = leaf(random((3, 2), rank))
    plain = leaf(random((3, 2), rank))
    loss(checkpoint(part, x, use_reentrant=reentrant), rank).backward()
    loss(part(plain), rank).backward()
    same(x.grad, plain.grad, "the gradient")


@pytest.mark.ranks(2)
def test_without_gradients(rank, world):
    x = leaf(random((2,), rank))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for y in (ag.all_gather(x), ag.all_reduce(x, "max"), ag.scan(x), ag.shift(x)):
                assert not y.requires_grad
    with torch.inference_mode():
        made_inside = torch.ones(2)
        assert ag.all_reduce(made_inside).tolist() == [2.0, 2.0]


# On two ranks, from (4, 3).
SHAPES = {
    "all_reduce": (ag.all_reduce, (4, 3)),
    "all_reduce max": (lambda x: ag.all_reduce(x, "max"), (4, 3)),
    "all_gather": (lambda x: ag.all_gather(x, 1, sizes="equal"), (4, 6)),
    "reduce_scatter": (lambda x: ag.reduce_scatter(x, sizes="equal"), (2, 3)),
    "all_to_all": (lambda x: ag.all_to_all(x, send_sizes="equal"), (4, 3)),
    "broadcast": (ag.broadcast, (4, 3)),
    "shift": (lambda x: ag.shift(x, sizes="equal"), (4, 3)),
    "scan": (ag.scan, (4, 3)),
    "split": (ag.split, (2, 3)),
    "share": (ag.share, (4, 3)),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", SHAPES)
def test_tensors_that_only_have_a_shape_send_nothing(rank, world, name):
    """Only rank 0 calls: if anything were sent, it would wait for ever."""
    if rank:
        return
    call, shape = SHAPES[name]
    x = torch.empty(4, 3, device="meta", requires_grad=True)
    y = call(x)
    assert (tuple(y.shape), y.device.type) == (shape, "meta")
    y.sum().backward()
    assert x.grad.shape == x.shape
    with FakeTensorMode():
        z = call(torch.empty(4, 3))
        assert tuple(z.shape) == shape


@pytest.mark.ranks(2)
def test_anomaly_detection_and_hooks(rank, world):
    x = leaf(random((2,), rank))
    seen = []
    with torch.autograd.set_detect_anomaly(True):
        hidden = x * 3
        hidden.register_hook(lambda g: seen.append(g.clone()) or g * 2)
        x.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        y = ag.all_reduce(hidden)
        y.register_hook(lambda g: g + 1)
        y.sum().backward()
    same(seen[0], torch.full_like(seen[0], 2.0 * world), "the gradient at the hook")
    same(seen[1], torch.full_like(seen[0], 2.0 * world * 2 * 3), "the accumulated gradient")


@pytest.mark.ranks(2)
def test_one_message_each_way(rank):
    x = leaf(random((2, 2), rank))
    with Counted() as calls:
        y = ag.all_gather(x, sizes="equal")
        grads(y.sum(), [x])
    assert calls == ["all_gather", "reduce_scatter"]
