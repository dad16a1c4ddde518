"""Dot products of float32 by tensor cores: as exact as torch's own."""

import pytest
import torch

from allgrad.losses import clip_loss, reference, siglip_loss
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
    # One product of 8 bits would not pass.
    assert error((q.bfloat16() @ k.bfloat16().T).float()) > 1e-3


def test_numbers_of_any_size():
    x = torch.tensor([[1e30, -3e-30, 1.0, 0.0]], device="cuda")
    found = float32_dots.dots_of_parts(x, torch.eye(4, device="cuda"))
    torch.testing.assert_close(found, x, rtol=2**-23, atol=0)


@pytest.mark.parametrize(
    ("loss", "formula"), [(clip_loss, reference.clip), (siglip_loss, reference.siglip)]
)
def test_losses_by_parts(loss, formula, monkeypatch):
    monkeypatch.setattr(float32_dots, "_has_fast_cores", lambda _: True)
    torch.manual_seed(0)
    given = [torch.nn.functional.normalize(torch.randn(384, 96), dim=1) for _ in range(2)]
    exact = [x.double().requires_grad_() for x in given]
    want = formula(*exact, torch.tensor(20.0).double())
    want.backward()
    found = []
    for fewest in (2**62, 0):
        monkeypatch.setattr(float32_dots, "FEWEST", fewest)
        xs = [x.cuda().requires_grad_() for x in given]
        value = loss(*xs, 20.0)
        value.backward()
        torch.testing.assert_close(value.double().cpu(), want, rtol=5e-6, atol=0)
        for x, y in zip(xs, exact, strict=True):
            assert (x.grad.double().cpu() - y.grad).norm() < 1e-5 * y.grad.norm()
        found.append(xs[0].grad)
    assert not torch.equal(*found)  # two ways indeed
