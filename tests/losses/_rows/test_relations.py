"""Losses with several positives and late interaction in 16 bits, beside float64."""

import pytest
import torch
from torch.nn.functional import normalize

from allgrad.losses import maxsim_loss, multiple_negatives_loss, reference, supcon_loss

IDS = torch.arange(64)
LOSSES = {
    "multiple_negatives": multiple_negatives_loss,
    "supcon": lambda q, k, scale: supcon_loss(q, k, scale, IDS, IDS),
    "maxsim": lambda q, k, scale: maxsim_loss(q[:, None], k[:, None], scale),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LOSSES)
def test_products_of_16_bits_are_not_rounded_to_16_bits(name, dtype):
    """Of features close together, such products differ from each other in their last digits only."""
    torch.manual_seed(0)
    common = normalize(torch.randn(128), dim=0)
    key = normalize(normalize(torch.randn(64, 128), dim=1) / 5 + common, dim=1)
    query = normalize(key + torch.randn(64, 128) / 220, dim=1)
    given = [x.to(dtype).requires_grad_() for x in (query, key)]
    exact = [x.detach().double().requires_grad_() for x in given]
    got, want = LOSSES[name](*given, 100.0), reference.info_nce(*exact, 100.0)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=0)
    got.backward()
    want.backward()
    near = 4 * torch.finfo(dtype).eps
    for x, y in zip(given, exact, strict=True):
        assert (x.grad.double() - y.grad).norm() < near * y.grad.norm()
