"""Products of wide copies of 16-bit features: as exact as those of the copies, where tensor cores make them."""

import pytest
import torch

from allgrad.losses._tiles import narrow_products
from allgrad.losses._tiles.narrow_products import similarities, weighted_features
from exactness import random

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def features(rows, seed, dtype, device="cpu"):
    """Numbers of ``dtype`` in float32."""
    return random((rows, 24), seed).to(dtype).to(device, torch.float32)


def distance(got, want):
    assert got.shape == want.shape
    assert got.dtype == torch.float32
    return (got.double() - want).norm() / want.norm()


def check(dtype, device, near):
    x, y = features(37, 1, dtype, device), features(53, 2, dtype, device)
    weights = random((37, 53), 3).float().to(device)
    assert distance(similarities(x, y, dtype), x.double() @ y.double().T) < 1e-6
    wanted = weights.double() @ y.double(), weights.double().T @ x.double()
    for got, want in zip(weighted_features(weights, x, y, dtype), wanted, strict=True):
        assert distance(got, want) < near
    for given in ((x, None), (None, y), (None, None)):
        found = weighted_features(weights, *given, dtype)
        assert [z is not None for z in found] == [z is not None for z in given[::-1]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_on_a_host(dtype, monkeypatch):
    monkeypatch.setattr(narrow_products, "FEWEST", 0)
    check(dtype, "cpu", 1e-6)


@needs_cuda
@pytest.mark.parametrize("fewest", [0, 2**31])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_on_a_device(dtype, fewest, monkeypatch):
    monkeypatch.setattr(narrow_products, "FEWEST", fewest)
    check(dtype, "cuda", 2**-16 if dtype == torch.bfloat16 and not fewest else 1e-6)


@needs_cuda
def test_weights_on_tensor_cores_keep_twice_the_digits_of_bfloat16(monkeypatch):
    monkeypatch.setattr(narrow_products, "FEWEST", 0)
    x, y = (features(n, 1, torch.bfloat16, "cuda") for n in (64, 96))
    weights = random((64, 96), 3).float().cuda()
    want = weights.double() @ y.double()
    found = weighted_features(weights, x, y, torch.bfloat16)[0]
    rounded = weights.bfloat16().double() @ y.double()
    assert distance(found, want) < 0.02 * distance(rounded.float(), want)
