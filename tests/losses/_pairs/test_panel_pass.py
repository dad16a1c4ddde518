"""Softmax along rows and sigmoid on CPUs, some rows at a time: against the formula in float64."""

import pytest
import torch
from torch.nn.functional import normalize

from allgrad.losses import info_nce_loss, reference, siglip_loss
from allgrad.losses._pairs import key_sums, panel_pass, whole_pass
from allgrad.losses._tiles import cpu_bfloat16
from losses._pairs.test_engine import check
from losses.pairs import LOSSES


@pytest.mark.parametrize(("rows", "overlaps_from"), [(1, 2**18), (2, 0)])
@pytest.mark.ranks(1, 3)
def test_panels_that_fit_nothing_evenly(rank, world, rows, overlaps_from):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_sums, "OVERLAPS_FROM", overlaps_from)
        patch.setattr(panel_pass, "PANEL_SCORES", 0)
        patch.setattr(panel_pass, "FEWEST_ROWS", rows)
        for name in LOSSES:
            if "clip" not in name:
                check(None, name, "ragged")
                check(None, name, "empty", grad_reduction="sum")


@pytest.mark.parametrize("speed", [1, 2, 8])
@pytest.mark.parametrize("loss", [siglip_loss, info_nce_loss])
def test_bfloat16_keeps_its_scores_in_float32(monkeypatch, loss, speed):
    """Scores rounded to 16 bits would change the gradients by 0.01 and more, at this scale all of them."""
    monkeypatch.setattr(cpu_bfloat16, "FROM", 0)
    monkeypatch.setattr(cpu_bfloat16, "_speed", lambda: speed)
    monkeypatch.setattr(panel_pass, "PANEL_SCORES", 96 * 40)
    monkeypatch.setattr(panel_pass, "FEWEST_ROWS", 1)
    torch.manual_seed(0)
    image = normalize(torch.randn(96, 32), dim=1)
    text = normalize(image + normalize(torch.randn(96, 32), dim=1), dim=1)
    given = [x.bfloat16().requires_grad_() for x in (image, text)]
    exact = [x.detach().double().requires_grad_() for x in given]
    scale = torch.tensor(50.0)
    if loss is siglip_loss:
        got, want = loss(*given, scale, -10.0), reference.siglip(*exact, scale.double(), -10.0)
    else:
        got, want = loss(*given, scale), reference.info_nce(*exact, scale.double())
    torch.testing.assert_close(got.double(), want, rtol=1e-4 if speed > 2 else 1e-5, atol=0)
    got.backward()
    want.backward()
    for x, y in zip(given, exact, strict=True):
        assert (x.grad.double() - y.grad).norm() < 4e-3 * y.grad.norm()


@pytest.mark.parametrize(
    ("most", "counts"), [(2**21, (5, 2, 9)), (2**21, (4, 0, 7)), (0, (5, 0, 9))]
)
@pytest.mark.ranks(3)
def test_bfloat16_gradients_of_keys_on_all_ranks(rank, world, most, counts):
    """Products of bfloat16 for the keys of all ranks at once, and for one rank's at a time."""
    torch.manual_seed(0)
    whole = [normalize(torch.randn(sum(counts), 32), dim=1).bfloat16() for _ in range(2)]
    exact = [x.double().requires_grad_() for x in whole]
    given = [x.split(counts)[rank].clone().requires_grad_() for x in whole]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_bfloat16, "FROM", 0)
        patch.setattr(cpu_bfloat16, "_speed", lambda: 8)
        patch.setattr(key_sums, "ONE_PRODUCT_UP_TO", most)
        patch.setattr(whole_pass, "SMALL_UP_TO", 0)
        got = siglip_loss(*given, 20.0, -10.0)
        got.backward()
    want = reference.siglip(*exact, torch.tensor(20.0).double(), -10.0)
    want.backward()
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=0)
    for x, y in zip(given, exact, strict=True):
        of_rank = world * y.grad.split(counts)[rank]
        assert (x.grad.double() - of_rank).norm() <= 4e-3 * of_rank.norm()
