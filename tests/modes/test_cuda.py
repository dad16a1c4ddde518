"""The same on CUDA tensors: Gloo with two ranks on one GPU, NCCL in a world of one."""

import os

import pytest
import torch
import torch.distributed as dist

import allgrad as ag
import orders
from allgrad._wire import algorithms, eager
from allgrad._wire import primitives as wire
from allgrad._wire.groups import Backend
from calls import CALLS, Place
from differentiation import MODES, RANK, WANTED, Through
from exactness import grads, leaf, loss, random, same

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def on_gpu(call, place, x):
    """The call on the GPU, seen from the CPU."""
    return call.run(place, x.cuda()).cpu()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", CALLS)
def test_gloo_forward_and_backward(rank, world, name):
    call = CALLS[name]
    shapes = call.shapes(world)
    x, y = (leaf(random(shapes[rank % len(shapes)], rank % len(shapes))) for _ in range(2))
    got, want = on_gpu(call, Place(rank, world), x), call.run(Place(rank, world), y)
    same(got.detach(), want.detach(), "the value")
    assert call.run(Place(rank, world), x.detach().cuda()).is_cuda
    if want.requires_grad:
        first = grads(loss(got, rank), [x], graph=True), grads(loss(want, rank), [y], graph=True)
        same(first[0][0].detach(), first[1][0].detach(), "the gradient")
        second = grads(loss(first[0][0], rank), [x]), grads(loss(first[1][0], rank), [y])
        same(second[0][0], second[1][0], "the second derivative")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["all_reduce sum", "all_gather", "all_reduce max", "permute"])
def test_gloo_every_mode(rank, world, name):
    call = CALLS[name]
    case = Through(call, Place(rank, world))
    moved = type(call)(lambda at, x: on_gpu(call, at, x), call.whole, call.shapes, call.kind)
    gpu = Through(moved, Place(rank, world))
    for mode in MODES:
        got = RANK[mode](gpu.function, gpu.loss, gpu.data())
        same(got.detach(), WANTED[mode](case), mode)


@pytest.mark.ranks(2)
def test_gloo_compiled(rank, world):
    at = Place(rank, world, sizes_given=True)

    def run(x):
        y = CALLS["all_gather"].run(at, x).sin()
        return ag.all_reduce(y, "max")

    x, y = (random((2, (2, 1)[rank]), rank).cuda().requires_grad_() for _ in range(2))
    got, want = torch.compile(run, fullgraph=True, backend="aot_eager")(x), run(y)
    same(got.detach(), want.detach(), "the value")
    got.square().sum().backward()
    want.square().sum().backward()
    same(x.grad, y.grad, "the gradient")


@pytest.mark.timeout(300)
@pytest.mark.ranks(2, timeout=280)
def test_gloo_one_order_of_second_derivatives(rank, world):
    """Autograd's own thread records them; each rank has made another number of nodes before."""
    for seed in range(200 if os.environ.get("ALLGRAD_ALL") else 20):
        got = orders.on_rank(seed, rank, orders.Threads(), ("main",), "cuda")
        for g, want in zip(got, orders.in_one_process(seed, world, ("main",))[rank], strict=True):
            same(g, want, f"the gradient of seed {seed}")


@pytest.mark.ranks(2)
def test_gloo_gradient_penalty_beside_another_call(rank, world):
    """The inner gradient has no collective: its graph is recorded where allgrad does not see it."""
    if rank:
        orders.make_nodes(3000)

    def penalised(early, late):
        (g,) = torch.autograd.grad((late**3).sum(), late, create_graph=True)
        return (early.sin() * (rank + 1)).sum() + g.square().sum()

    x = random((3,), rank).cuda().requires_grad_()
    penalised(ag.all_reduce(x.sin()), ag.all_reduce(x.cos())).backward()
    leaves = [leaf(random((3,), r)) for r in range(world)]
    early, late = (sum(f(t) for t in leaves) for f in (torch.sin, torch.cos))
    each = sum((early.sin() * (r + 1)).sum() for r in range(world))
    total = each + world * (9 * late**4).sum()
    same(x.grad.cpu(), grads(total, leaves)[rank], "the gradient")


def everything(x):
    y = ag.all_gather(x).sin() + ag.all_reduce(x, "max")
    y = ag.reduce_scatter(y) * ag.broadcast(x) + ag.scan(ag.shift(x))
    return ag.all_to_all(y).square()


def in_torch(x):
    return ((x.sin() + x) * x + x).square()


@pytest.fixture(params=["shortcut", "backend"])
def way(request):
    """A world of one has nothing to send; or it makes the backend's calls all the same."""
    return request.param


def take(way, monkeypatch):
    if way == "backend":
        monkeypatch.setattr(wire, "_dispatch", wire._run)


@pytest.mark.ranks(1, backend="nccl")
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_nccl_in_a_world_of_one(world, backend, way, monkeypatch):
    torch._dynamo.reset()
    take(way, monkeypatch)
    assert dist.get_backend() == "nccl"
    x, y = (random((4, 3), 1).cuda().requires_grad_() for _ in range(2))
    run = everything
    if backend != "eager":
        run = torch.compile(everything, fullgraph=True, backend=backend)
    got, want = run(x), in_torch(y)
    same(got.detach(), want.detach(), "the value")
    got.sum().backward()
    want.sum().backward()
    same(x.grad, y.grad, "the gradient")


@pytest.mark.ranks(1, backend="nccl")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_nccl_algorithms(world, dtype):
    """Every algorithm that the table names for NCCL, each in one call of the backend."""
    call = wire.resolve("test", None)
    x = torch.arange(6).cuda().to(dtype)
    for run in (eager.all_gather, eager.all_gather_list, eager.reduce_scatter_list):
        assert torch.equal(run(call, x, [6]), x)
    assert torch.equal(eager.reduce(call, x, 0), x)
    assert torch.equal(eager.all_reduce(call, x), x)
    assert torch.equal(eager.broadcast(call, x, 0), x)
    assert torch.equal(eager.all_to_all(call, x, [6], [6]), x)
    assert torch.equal(eager.all_to_all(call, x, [6], [6], equal=True), x)
    assert call.group.backend(x.device) is Backend.NCCL

    def chosen(operation, equal):
        situation = algorithms.Situation(operation, Backend.NCCL, False, 4, 8, 32, equal)
        return algorithms.choose(situation).name

    for operation in algorithms.TABLE:
        assert chosen(operation, True) == "backend"
    for operation in ("all_gather", "reduce_scatter"):
        assert chosen(operation, False) == "backend_list"


@pytest.mark.ranks(1, backend="nccl")
def test_nccl_does_not_stop_the_host_when_sizes_are_given(world, monkeypatch):
    take("backend", monkeypatch)
    x = random((4, 3), 1).cuda().requires_grad_()
    given = {"sizes": [4]}
    run = {
        "all_gather": lambda: ag.all_gather(x, **given),
        "reduce_scatter": lambda: ag.reduce_scatter(x, **given),
        "all_reduce": lambda: ag.all_reduce(x),
        "all_to_all": lambda: ag.all_to_all(x, send_sizes=[4], recv_sizes=[4]),
        "broadcast": lambda: ag.broadcast(x),
        "shift": lambda: ag.shift(x, **given),
    }
    for name, call in run.items():
        call().sum().backward()  # the communicator connects on first use
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            call().sum().backward()
        except RuntimeError as error:
            pytest.fail(f"{name}: {error}")
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.ranks(1, backend="nccl")
def test_captured_in_a_cuda_graph(world, way, monkeypatch):
    """Forward and backward, replayed on other values."""
    take(way, monkeypatch)
    x = random((4, 3), 1).cuda().requires_grad_()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            torch.autograd.grad(everything(x).sum(), x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = everything(x)
        (g,) = torch.autograd.grad(y.sum(), x)
    for seed in (2, 3):
        with torch.no_grad():
            x.copy_(random((4, 3), seed))
        graph.replay()
        want_x = random((4, 3), seed).cuda().requires_grad_()
        want = in_torch(want_x)
        same(y.detach(), want.detach(), "the value")
        same(g, torch.autograd.grad(want.sum(), want_x)[0], "the gradient")
