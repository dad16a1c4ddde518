"""Copies between the host and CUDA: buckets, streams, and the names of devices."""

from __future__ import annotations

import pytest
import torch

from allgrad import devices
from allgrad.devices import _copies
from allgrad.errors import InputError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_many_small_tensors_are_copied_together_between_host_and_device():
    xs = [torch.randn(i % 7, 3, dtype=torch.float64, requires_grad=True) for i in range(500)]
    xs += [torch.arange(i) for i in range(50)] + [torch.randn(100_000)]
    targets = ["cuda:0", "cpu", "cuda:0"]
    devices.broadcast(xs, targets)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        copies = devices.broadcast(xs, targets)
        torch.cuda.synchronize()
    to_device = sum(e.count for e in profile.key_averages() if "HtoD" in e.key)
    assert 0 < to_device < 30
    for copy in copies:
        assert all(torch.equal(a.cpu(), b) for a, b in zip(copy, xs, strict=True))
        assert len({a.untyped_storage().data_ptr() for a in copy if a.numel()}) == sum(
            a.numel() > 0 for a in copy
        )
    added = devices.reduce_add([copy[:500] for copy in copies], "cuda:0")
    assert all(torch.equal(a.cpu(), 3 * b) for a, b in zip(added, xs[:500], strict=True))
    sum((i * x.sin()).sum() for i, x in enumerate(added)).backward()
    for i, x in enumerate(xs[:500]):
        torch.testing.assert_close(x.grad, 3 * i * (3 * x.detach()).cos(), rtol=1e-12, atol=1e-13)


def test_buckets_hold_any_strides_and_dtypes():
    real = torch.randn(3, 4, dtype=torch.float64)
    xs = [real.T, real[::2], real[:, :1].expand(3, 4), real[0, 0], torch.complex(real, real).conj()]
    xs += [torch.complex(real, real).mT.conj(), real.bfloat16(), real.bfloat16() > 0, real < 0]
    (copies,) = devices.broadcast(xs, [0])
    for copy, x in zip(copies, xs, strict=True):
        assert copy.is_contiguous()
        assert copy.dtype == x.dtype
        assert torch.equal(copy.cpu(), x)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(devices.to_device(xs, 0), xs, strict=True))


def test_a_bucket_has_a_limit(monkeypatch):
    monkeypatch.setattr(_copies, "_BUCKET_BYTES", 1000)
    xs = [torch.randn(n) for n in range(60)]
    (copies,) = devices.broadcast(xs, [0])
    assert all(torch.equal(a.cpu(), b) for a, b in zip(copies, xs, strict=True))


@pytest.mark.parametrize(
    "delay", [0, 100_000_000]
)  # 0 shows a missing wait, the delay shows memory reused too early
@pytest.mark.parametrize("pinned", [False, True])
def test_the_current_stream_waits_for_copies_from_the_host(pinned, delay):
    source, zeros = torch.ones(1 << 24), torch.zeros(1 << 24)
    source, zeros = (source.pin_memory(), zeros.pin_memory()) if pinned else (source, zeros)
    for _ in range(5):
        with torch.cuda.stream(torch.cuda.Stream()):
            pieces = devices.scatter(source, [0, 0, 0])
            torch.cuda._sleep(delay)
            totals = [int(total) for total in _totals_after_release(pieces, zeros)]
        assert totals == [len(part) for part in source.tensor_split(3)]


def _totals_after_release(pieces, zeros):
    """Sums that run after the pieces are freed, when other copies may take their memory."""
    totals = [piece.sum() for piece in pieces]
    pieces.clear()
    devices.scatter(zeros, [0, 0, 0])
    return totals


def test_copies_from_pinned_memory_overlap_with_work():
    source = torch.ones(1 << 24, pin_memory=True)
    devices.to_device(source * 2, 0).sum().item()  # warm-up: loads the kernels
    torch.cuda._sleep(2_000_000_000)  # about a second of the current stream
    moved = devices.to_device(source, 0)  # waits for its copy, not for the work before it
    with torch.cuda.stream(torch.cuda.Stream()):
        total = moved.sum().item()
    assert not torch.cuda.current_stream().query()
    assert total == len(source)


def test_device_names_mean_one_device():
    x = torch.ones(3)
    for name in (0, "cuda", "cuda:0", torch.device("cuda")):
        assert devices.broadcast(x, [name])[0].device == torch.device("cuda:0")
    moved = devices.to_device(x, "cuda")
    assert devices.to_device(moved, 0) is moved
    with pytest.raises(InputError, match="there is no cuda:99 here"):
        devices.to_device(x, 99)
