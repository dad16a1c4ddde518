"""Losses on a CUDA device against the formula in float64, at sizes that fill no tile evenly."""

import pytest
import torch
from torch.nn.functional import normalize

from allgrad.losses import clip_loss, info_nce_loss, reference, siglip_loss
from allgrad.losses._kind import LossKind
from allgrad.losses._tiles import torch as torch_tiles
from allgrad.losses._tiles.torch import Tiles
from losses.pairs import SATURATED, saturated

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

NEAR = {torch.bfloat16: 3e-3, torch.float16: 1e-3, torch.float32: 3e-5}
LOSSES = {
    "clip": (clip_loss, reference.clip, 14.3, {}),
    "clip, sharp": (clip_loss, reference.clip, 100.0, {}),
    "clip, smoothed": (clip_loss, reference.clip, 20.0, {"label_smoothing": 0.1}),
    "info_nce": (info_nce_loss, reference.info_nce, 20.0, {}),
    "siglip": (siglip_loss, reference.siglip, 10.0, {}),
}


def features(pairs, width, dtype, length=1.0):
    generator = torch.Generator().manual_seed(pairs + width)
    image = normalize(torch.randn(pairs, width, generator=generator), dim=1)
    other = normalize(torch.randn(pairs, width, generator=generator), dim=1)
    text = normalize(image / 10 + other, dim=1)  # similar, but the loss is not zero
    return (length * image).to(dtype), (length * text).to(dtype)


def check(name, pairs, width, dtype, length=1.0):
    loss, formula, scale, options = LOSSES[name]
    numbers = [torch.tensor(scale), *([torch.tensor(-9.5)] if name == "siglip" else [])]
    negatives = [features(77, width, dtype)[0]] if name == "info_nce" else []
    given = [*features(pairs, width, dtype, length), *numbers, *negatives]
    exact = [x.double().requires_grad_() for x in given]
    want = formula(*exact, **options)
    want.backward()
    given = [x.cuda().requires_grad_() for x in given]
    got = loss(*given, **options)
    got.backward()
    torch.testing.assert_close(got.double().cpu(), want, rtol=1e-4, atol=1e-4)
    for x, y in zip(given, exact, strict=True):
        error = (x.grad.double().cpu() - y.grad).norm() / y.grad.norm()
        zero = y.grad.norm() < 1e-6 and x.grad.norm() < 1e-4  # a single pair has no negatives
        # The gradient of the scale is a sum that cancels; rounding errors average out over many pairs only.
        near = NEAR[dtype] * (10 if pairs == 1 and x.dim() == 0 else 1)
        assert zero or error < near, name


@pytest.fixture(params=["kept", "tiles"], autouse=True)
def scores(request, monkeypatch):
    """Kept from forward to backward, or computed in tiles each time."""
    if request.param == "tiles":
        monkeypatch.setitem(torch_tiles.KEPT_SCORES, "cuda", 0)
    return request.param


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradients(name, dtype):
    for pairs, width in ((1, 64), (130, 64), (1031, 100), (700, 771), (513, 2048)):
        check(name, pairs, width, dtype)


@pytest.mark.parametrize("dtype", NEAR)
def test_sigmoids_of_scores_on_both_sides(dtype):
    """Long features have scores above zero too, which then make most of the loss."""
    for pairs, width in ((130, 64), (1031, 100)):
        check("siglip", pairs, width, dtype, length=3.0)


@pytest.mark.parametrize("name", LOSSES)
def test_panels_that_fit_nothing_evenly(name, monkeypatch):
    monkeypatch.setitem(torch_tiles.KEPT_SCORES, "cuda", 0)
    from allgrad.losses._tiles import triton as triton_tiles

    monkeypatch.setattr(triton_tiles.TritonTiles, "panel", 264)
    monkeypatch.setattr(triton_tiles.TritonTiles, "sums_panel", 392)
    monkeypatch.setattr(triton_tiles, "_PANEL_COLUMNS", {2**25: 528})
    check(name, 1031, 100, torch.bfloat16)
    check(name, 800, 64, torch.float16)
    check(name, 1031, 100, torch.float32)
    # Beside large keys, of which each kind and dtype has panels of its own.
    monkeypatch.setattr(triton_tiles, "_PANEL_COLUMNS", {})
    monkeypatch.setattr(triton_tiles, "_PANEL_COLUMNS_LARGE", 528)
    monkeypatch.setattr(triton_tiles, "_WIDE_PANEL", (392, 528))
    for dtype in NEAR:
        check(name, 1031, 100, dtype)


@pytest.fixture
def matmul_switches():
    """Torch's switches for products of float32, put back afterwards (monkeypatch would delete this one)."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    yield matmul
    matmul.fp32_precision = before


@pytest.mark.parametrize(("precision", "near"), [("ieee", 5e-6), ("tf32", 1e-3)])
def test_float32_follows_the_switch_for_tf32(precision, near, matmul_switches, monkeypatch):
    """Tensor cores multiply 11 bits; three of their products make one in float32."""
    matmul_switches.fp32_precision = precision
    monkeypatch.setitem(NEAR, torch.float32, near)
    for name in LOSSES:
        check(name, 1031, 512, torch.float32)


def test_scores_too_far_apart_for_one_exp():
    """Long features have scores far below the bound: the safe kernels must take over."""
    from allgrad.losses._tiles.triton import TritonTiles

    image, text = (x.cuda() for x in features(300, 64, torch.bfloat16, length=9.0))
    image[:7] *= 10
    scores = TritonTiles(image, text, torch.tensor(3.0, device="cuda"), first_pair=0)
    rows, columns = scores.lse(LossKind.SOFTMAX_BOTH)
    assert scores.scalars[3] != 0
    three = torch.tensor(3.0).double().cuda()
    exact = Tiles(image.double(), text.double(), three, first_pair=0)
    for got, want in zip((rows, columns), exact.lse(LossKind.SOFTMAX_BOTH), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)
    check("clip", 300, 64, torch.bfloat16, length=9.0)


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("pairs", [2, 129, 300])
def test_tiny_loss_of_saturated_scores_keeps_its_digits(pairs, dtype):
    """With 129 pairs one tile has a single column: the row of its pair has no other score there."""
    for name, (loss, formula, numbers) in SATURATED.items():
        for longest in (1, 4):
            given = saturated((pairs,), dtype, width=256)
            if name != "siglip":  # a long pair makes the shift fail
                given = [torch.cat([longest * x[:1], x[1:]]) for x in given]
            want = formula(*(x.double() for x in given), *numbers)
            assert 0 < want < 1e-4
            got = loss(*(x.cuda() for x in given), *numbers)
            torch.testing.assert_close(got.double().cpu(), want, rtol=1e-3, atol=0)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", LOSSES)
def test_a_feature_that_is_no_number_is_not_hidden(name, value):
    """The largest norm ignores NaN, but the scores do not."""
    loss, _, scale, options = LOSSES[name]
    image, text = (x.cuda() for x in features(300, 64, torch.bfloat16))
    image[5, 7] = value
    numbers = [scale, *([-9.5] if name == "siglip" else [])]
    assert not loss(image, text, *numbers, **options).isfinite()


def test_no_scores_at_all():
    from allgrad.losses._tiles.triton import TritonTiles

    none = torch.empty(0, 64, dtype=torch.bfloat16, device="cuda")
    some = torch.ones(3, 64, dtype=torch.bfloat16, device="cuda")
    rows, columns = TritonTiles(none, some, torch.tensor(1.0, device="cuda")).lse(
        LossKind.SOFTMAX_BOTH
    )
    assert rows.shape == (0,)
    assert columns.tolist() == [-torch.inf] * 3


def test_memory_is_far_below_the_matrix_of_scores():
    pairs = 65536
    image, text = (x.cuda().requires_grad_() for x in features(pairs, 64, torch.bfloat16))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    clip_loss(image, text, 20.0, sizes="equal").backward()
    assert torch.cuda.max_memory_allocated() - before < pairs**2 // 8


def test_large_loss_scale_keeps_small_gradients_of_float16():
    image, text = features(1000, 64, torch.float16)
    exact = [x.double().requires_grad_() for x in (image, text)]
    (2.0**16 * reference.siglip(*exact, 10.0, -10.0)).backward()
    given = [x.cuda().requires_grad_() for x in (image, text)]
    (2.0**16 * siglip_loss(*given, 10.0, -10.0)).backward()
    for x, y in zip(given, exact, strict=True):
        assert (x.grad.double().cpu() - y.grad).norm() / y.grad.norm() < 1e-3


@pytest.mark.ranks(2)
@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_ranks_that_share_a_device(rank, name, ring):
    """Several steps over Gloo: messages and kernels run on different streams and keep their order."""
    loss, formula, scale, _ = LOSSES[name]
    counts = (900, 700)
    numbers = [torch.tensor(scale), *([torch.tensor(-9.5)] if name == "siglip" else [])]
    whole = [*features(sum(counts), 96, torch.bfloat16), *numbers]
    exact = [x.double().requires_grad_() for x in whole]
    want = formula(*exact)
    want.backward()
    own = [x.split(counts)[rank] if x.dim() else x for x in whole]
    for _ in range(6):  # the last ones are expected: the row of arguments travels with the keys
        given = [x.cuda().requires_grad_() for x in own]
        got = loss(*given, grad_reduction="sum", ring=ring)
        got.backward()
        torch.testing.assert_close(got.double().cpu(), want, rtol=1e-4, atol=1e-4)
        for x, y in zip(given[:2], exact[:2], strict=True):
            mine = y.grad.split(counts)[rank]
            assert (x.grad.double().cpu() - mine).norm() / mine.norm() < NEAR[torch.bfloat16]
