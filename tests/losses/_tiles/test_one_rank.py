"""One rank alone on a CUDA device: prepared launches and replayed steps give what the formula gives."""

import pytest
import torch
from torch.nn.functional import normalize
from torch.utils.checkpoint import checkpoint

from allgrad.losses import clip_loss, reference, siglip_loss

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LOSSES = {
    "clip": (clip_loss, reference.clip, (14.3,)),
    "siglip": (siglip_loss, reference.siglip, (10.0, -9.5)),
    "siglip without bias": (siglip_loss, reference.siglip, (10.0,)),
}
NEAR = {torch.bfloat16: 3e-3, torch.float16: 1e-3}


@pytest.fixture(autouse=True)
def known(monkeypatch):
    """No step is captured yet."""
    replay = pytest.importorskip("allgrad.losses._tiles.replay")
    monkeypatch.setattr(replay, "_known", replay._Known())
    return replay._known


def inputs(name, seed, pairs=300, width=96, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    image, other = (
        normalize(torch.randn(pairs, width, generator=generator), dim=1) for _ in range(2)
    )
    text = normalize(image / 10 + other, dim=1)
    given = [image.to(dtype), text.to(dtype), *map(torch.tensor, LOSSES[name][2])]
    return [x.cuda().requires_grad_() for x in given]


def check(name, given, loss, weight=1.0):
    exact = [x.detach().double().cpu().requires_grad_() for x in given]
    want = LOSSES[name][1](*exact)
    (weight * want).backward()
    torch.testing.assert_close(loss.detach().double().cpu(), want.detach(), rtol=1e-4, atol=1e-4)
    for x, y in zip(given, exact, strict=True):
        error = (x.grad.double().cpu() - y.grad).norm() / y.grad.norm()
        assert error < NEAR[given[0].dtype], (name, error)


def step(name, seed, weight=1.0, **shape):
    given = inputs(name, seed, **shape)
    loss = LOSSES[name][0](*given)
    (weight * loss).backward()
    return given, loss


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("name", LOSSES)
def test_replayed_steps_are_those_launched_one_by_one(name, dtype, known):
    for seed in range(8):
        given, loss = step(name, seed, weight=1.7, dtype=dtype)
        check(name, given, loss, 1.7)
    (captured,) = known.steps.values()
    assert captured.calls == 3
    known.steps.clear()
    again, other = step(name, 7, weight=1.7, dtype=dtype)
    assert torch.equal(loss, other)
    for x, y in zip(given, again, strict=True):
        assert torch.equal(x.grad, y.grad)


def test_gradient_of_one_input_only(known):
    for needed in range(3):
        for seed in range(7):
            given = [x.detach() for x in inputs("clip", seed)]
            given[needed].requires_grad_()
            clip_loss(*given).backward()
        whole, _ = step("clip", 6)
        torch.testing.assert_close(given[needed].grad, whole[needed].grad)
    assert len(known.steps) == 3


def test_losses_whose_backward_comes_later(known):
    for seed in range(6):
        step("clip", seed)
    many = [inputs("clip", seed) for seed in range(20, 24)]
    losses = [clip_loss(*given) for given in many]
    assert next(iter(known.steps.values())).calls == 2
    for given, loss in zip(many, losses, strict=True):
        loss.backward()
        check("clip", given, loss)


def test_retained_graph_after_its_products_were_overwritten():
    for seed in range(6):
        step("clip", seed)
    given = inputs("clip", 20)
    loss = clip_loss(*given)
    loss.backward(retain_graph=True)
    step("clip", 21)
    for x in given:
        x.grad = None
    loss.backward()
    check("clip", given, loss)


def test_losses_that_are_dropped_give_their_products_back(known):
    for seed in range(20):
        clip_loss(*inputs("clip", seed))
    (captured,) = known.steps.values()
    assert captured.calls == 15


def test_each_stream_has_its_own_products(known):
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for seed in range(8):
                given, loss = step("clip", seed)
            check("clip", given, loss)
    assert len(known.steps) == 3


def test_two_streams_at_a_time(known):
    """Products of captured steps work in memory of their own on each stream."""
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    given = [inputs("clip", 0, pairs=2048, width=512) for _ in streams]
    torch.cuda.synchronize()
    for _ in range(40):
        found = []
        for stream, own in zip(streams, given, strict=True):
            for x in own:
                x.grad = None
            with torch.cuda.stream(stream):
                clip_loss(*own).backward()
            found.append(own)
        torch.cuda.synchronize()
        for x, y in zip(*found, strict=True):
            assert torch.equal(x.grad, y.grad)
    assert len(known.steps) == 2


@pytest.mark.parametrize(("pairs", "width"), [(300, 96), (4096, 512)])
def test_memory_of_cublas_is_given_back(known, pairs, width):
    """As by torch.compile before it captures a graph. What takes its place is not overwritten, and the steps stay right."""
    for seed in range(8):
        step("clip", seed, pairs=pairs, width=width)
    want = step("clip", 9, pairs=pairs, width=width)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    others = [torch.full((2**25,), 7, dtype=torch.uint8, device="cuda") for _ in range(64)]
    again = step("clip", 9, pairs=pairs, width=width)
    assert next(iter(known.steps.values())).last_used == known.calls
    assert torch.equal(want[1], again[1])
    for x, y in zip(want[0], again[0], strict=True):
        assert torch.equal(x.grad, y.grad)
    assert all(bool((x == 7).all()) for x in others)
    for seed in range(8):  # captured after it
        given, loss = step("clip", seed, pairs=pairs + 8, width=width)
        check("clip", given, loss)
    assert len(known.steps) == 2


def test_second_derivative_of_a_replayed_step(known):
    for seed in range(6):
        step("clip", seed)
    found = []
    for clear in (False, True):
        if clear:
            known.steps.clear()
        given = inputs("clip", 30)
        by_image, _ = torch.autograd.grad(clip_loss(*given), given[:2], create_graph=True)
        by_image.float().square().sum().backward()
        found.append([x.grad for x in given])
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y)


def test_inside_a_checkpoint():
    for seed in range(9):
        given = inputs("clip", seed)
        loss = checkpoint(clip_loss, *given, use_reentrant=False)
        loss.backward()
        check("clip", given, loss)


def test_captured_by_the_caller(known):
    given = inputs("clip", 1)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(8):
            clip_loss(*given).backward()
    torch.cuda.current_stream().wait_stream(side)
    for x in given:
        x.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = clip_loss(*given)
        loss.backward()
    other = inputs("clip", 2)
    with torch.no_grad():
        for x, y in zip(given, other, strict=True):
            x.copy_(y)
    graph.replay()
    check("clip", given, loss)


def test_without_capture_kernels_are_launched_one_by_one(known, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", refuse)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_end", refuse)
    for seed in range(8):
        given, loss = step("clip", seed)
        check("clip", given, loss)
    assert not known.steps


def test_a_capture_that_fails_inside_leaves_all_as_it_was(known, monkeypatch):
    from allgrad.losses._tiles import replay

    real, calls = replay.loss_and_products, []

    def fails_in_the_capture(*args, **options):
        calls.append(torch.cuda.is_current_stream_capturing())
        if calls[-1]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*args, **options)

    monkeypatch.setattr(replay, "loss_and_products", fails_in_the_capture)
    for seed in range(12):
        given, loss = step("clip", seed)
        check("clip", given, loss)
    assert calls == [False, True]
    assert not known.steps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_scale_and_bias_of_other_dtypes_and_shapes(dtype, known):
    for seed in range(8):
        given = inputs("siglip", seed)
        numbers = [x.detach().to(dtype).reshape(1).requires_grad_() for x in given[2:]]
        siglip_loss(*given[:2], *numbers).backward()
    assert len(known.steps) == 1
    rounded = [*given[:2], *(x.detach().float().reshape(()).requires_grad_() for x in numbers)]
    exact = [x.detach().double().requires_grad_() for x in rounded]
    reference.siglip(*exact).backward()
    for x, y in zip([*given[:2], *numbers], exact, strict=True):
        assert x.grad.shape == x.shape
        got = x.grad.double().reshape(y.shape)
        assert (got - y.grad).norm() / y.grad.norm() < 2e-2


def test_the_host_never_waits():
    given = inputs("clip", 1)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(8):
            clip_loss(*given, sizes="equal").backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_memory_of_captured_steps_is_bounded(known, monkeypatch):
    from allgrad.losses._tiles import replay

    monkeypatch.setattr(replay, "max_bytes", lambda _: 2 << 20)
    for pairs in (300, 310, 320, 330, 340):
        for seed in range(7):
            given, loss = step("clip", seed, pairs=pairs)
        check("clip", given, loss)
        assert sum(key.bytes for key in known.steps) <= 2 << 20
    assert len(known.steps) == 2
    monkeypatch.setattr(replay, "STALE_AFTER", 10)
    for seed in range(7):
        step("clip", seed, pairs=350)
    assert 350 in [key.shape[0] for key in known.steps]
    free = torch.cuda.memory_allocated()
    known.steps.clear()
    assert torch.cuda.memory_allocated() < free


def test_features_at_odd_addresses_and_strides():
    for seed in range(8):
        given = inputs("clip", seed, pairs=64, width=33)
        rows = [torch.cat([x.flatten()[:1], x.flatten()])[1:].view(64, 33) for x in given[:2]]
        assert rows[0].data_ptr() % 16
        loss = clip_loss(rows[0], rows[1].T.contiguous().T, given[2])
        loss.backward()
        check("clip", given, loss)
