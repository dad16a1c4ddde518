"""Products of bfloat16 on CPUs: scores keep their digits, however fast the CPU multiplies."""

import pytest
import torch
from torch.nn.functional import normalize

from allgrad.losses import clip_loss, reference
from allgrad.losses._tiles import cpu_bfloat16
from allgrad.losses._tiles import torch as tiles


@pytest.mark.parametrize("shape", [(1, 5, 7), (3, 64, 16), (128, 512, 256)])
def test_two_products_give_the_digits_that_one_rounds_off(shape):
    torch.manual_seed(0)
    rows, columns, width = shape
    q, k = (torch.randn(n, width).bfloat16() for n in (rows, columns))
    got = cpu_bfloat16.product_of_two(q, k, out=torch.empty(rows, columns))
    exact = q.double() @ k.double().T
    size = q.double().abs() @ k.double().abs().T
    assert ((got - exact).abs() <= exact.abs() * 2.0**-16 + size * 2.0**-22).all()


@pytest.mark.parametrize(("speed", "wanted"), [(1, (0, 0)), (2, (1, 0)), (8, (1, 1))])
def test_only_long_products_are_in_bfloat16(monkeypatch, speed, wanted):
    monkeypatch.setattr(cpu_bfloat16, "_speed", lambda: speed)
    x = torch.empty(128, 256, dtype=torch.bfloat16)
    for choice, is_wanted in zip(
        (cpu_bfloat16.multiplies_bfloat16, cpu_bfloat16.multiplies_twice), wanted, strict=True
    ):
        assert choice(x, 256) == bool(is_wanted)
        assert not choice(x, 255)
        assert not choice(x.float(), 256)


@pytest.mark.parametrize("speed", [1, 2, 8])
@pytest.mark.parametrize("kept", [True, False])
def test_clip_loss_at_every_speed_of_such_products(monkeypatch, kept, speed):
    """Scores rounded to 16 bits would change the gradients by 0.01 and more, at this scale all of them."""
    monkeypatch.setattr(cpu_bfloat16, "FROM", 0)
    monkeypatch.setattr(cpu_bfloat16, "_speed", lambda: speed)
    if not kept:
        monkeypatch.setattr(tiles, "CPU_TILE", (40, 30))
        monkeypatch.setitem(tiles.KEPT_SCORES, "cpu", 0)
    torch.manual_seed(0)
    image = normalize(torch.randn(96, 32), dim=1)
    text = normalize(image + normalize(torch.randn(96, 32), dim=1), dim=1)
    given = [x.bfloat16().requires_grad_() for x in (image, text)]
    exact = [x.detach().double().requires_grad_() for x in given]
    scale = torch.tensor(50.0)
    got, want = clip_loss(*given, scale), reference.clip(*exact, scale.double())
    torch.testing.assert_close(got.double(), want, rtol=1e-4 if speed > 2 else 1e-5, atol=0)
    got.backward()
    want.backward()
    for x, y in zip(given, exact, strict=True):
        assert (x.grad.double() - y.grad).norm() < 4e-3 * y.grad.norm()
