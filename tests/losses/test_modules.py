"""The modules give the same losses, with the call signatures of open_clip."""

import torch

from allgrad.losses import ClipLoss, InfoNCELoss, SigLipLoss, clip_loss, info_nce_loss, siglip_loss
from losses.pairs import batch


def test_clip_takes_open_clip_calls():
    image, text, scale = batch("clip", (5,))
    want = clip_loss(image, text, scale, label_smoothing=0.1)
    loss = ClipLoss(label_smoothing=0.1)
    assert torch.equal(loss(image, text, scale), want)
    given = {"image_features": image, "text_features": text, "logit_scale": scale}
    assert torch.equal(loss(**given), want)
    got = loss(**given, logit_bias=None, output_dict=True)
    assert list(got) == ["contrastive_loss"]
    assert torch.equal(got["contrastive_loss"], want)


def test_clip_gives_a_bias_its_gradient_of_zero():
    image, text, scale = batch("clip", (5,))
    bias = torch.tensor(3.0, requires_grad=True)
    loss = ClipLoss()(image, text, scale, bias)
    loss.backward()
    assert torch.equal(loss, clip_loss(image, text, scale))
    assert bias.grad.item() == 0


def test_clip_takes_every_bias_that_siglip_takes():
    image, text, scale = (x.float() for x in batch("clip", (5,)))
    want = clip_loss(image, text, scale)
    for bias in (-10.0, torch.tensor([-10.0]), torch.tensor(-10.0, dtype=torch.float64)):
        got = ClipLoss()(image, text, scale, bias)
        assert got.dtype == want.dtype
        assert torch.equal(got, want)


def test_siglip_takes_open_clip_calls():
    image, text, scale, bias = batch("siglip", (5,))
    want = siglip_loss(image, text, scale, bias)
    given = {"image_features": image, "text_features": text, "logit_scale": scale}
    got = SigLipLoss()(**given, logit_bias=bias, output_dict=True)
    assert torch.equal(got["contrastive_loss"], want)
    assert torch.equal(SigLipLoss()(image, text, scale, bias), want)


def test_info_nce_takes_negatives_for_each_query():
    query, key, scale, negatives = batch("info_nce, negatives", (5, 1, 2, 1))
    by_query = negatives[:6].reshape(3, 2, -1)
    got = InfoNCELoss()(query, key, scale, by_query)
    assert torch.equal(got, info_nce_loss(query, key, scale, negatives[:6]))


def test_modules_compile_around_the_loss():
    image, text, scale = batch("clip", (5,))
    compiled = torch.compile(lambda a, b, s: 2 * ClipLoss()(a * 1, b, s), backend="eager")
    torch.testing.assert_close(compiled(image, text, scale), 2 * clip_loss(image, text, scale))
