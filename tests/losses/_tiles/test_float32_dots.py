"""Dot products of float32 by tensor cores: as exact as torch's own."""

import pytest
import torch

from allgrad.losses import clip_loss, siglip_loss
from allgrad.losses._tiles import float32_dots

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("shape", [(257, 130, 64), (512, 640, 512), (384, 33, 1025), (7, 5, 3)])
def test_as_exact_as_products_of_float32(shape):
    rows, columns, width = shape
    torch.manual_seed(0)
    q, k = (torch.randn(n, width, device="cuda") for n in (rows, columns))
    wanted = q.double() @ k.double().T

    def error(found):
        return float((found.double() - wanted).norm() / wanted.norm())

    by_torch = error(q @ k.T)
    assert error(float32_dots.dots_of_parts(q, k)) < 2 * by_torch + 1e-7
    # What a part less would do: the test can fail.
    assert error((q.bfloat16() @ k.bfloat16().T).float()) > 1e-3


def test_numbers_of_any_size():
    x = torch.tensor([[1e30, -3e-30, 1.0, 0.0]], device="cuda")
    found = float32_dots.dots_of_parts(x, torch.eye(4, device="cuda"))
    torch.testing.assert_close(found, x, rtol=2**-23, atol=0)


@pytest.mark.parametrize("loss", [clip_loss, siglip_loss])
def test_losses_by_parts(loss, monkeypatch):
    monkeypatch.setattr(float32_dots, "_has_fast_cores", lambda _: True)
    torch.manual_seed(0)
    given = [torch.nn.functional.normalize(torch.randn(384, 96), dim=1) for _ in range(2)]
    found = []
    for fewest in (2**62, 0):
        monkeypatch.setattr(float32_dots, "FEWEST", fewest)
        xs = [x.cuda().requires_grad_() for x in given]
        value = loss(*xs, 20.0)
        value.backward()
        found.append([value.detach(), *(x.grad for x in xs)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    assert not torch.equal(found[0][1], found[1][1])  # two ways indeed
