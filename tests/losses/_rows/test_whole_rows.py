"""One pass over whole rows: the losses and derivatives of the formulas that autograd differentiates."""

import pytest
import torch

from allgrad.losses._rows.row_losses import _LOSSES, _terms
from allgrad.losses._rows.score_tile import ScoreTile
from allgrad.losses._rows.whole_rows import _KINDS, has_one_pass, losses_and_derivatives
from exactness import leaf, random
from losses._rows.tiles import WEIGHTS, tile


def by_autograd(kind, tile):
    """Losses, counts, and the derivative of each loss by its scores, from the formulas."""
    losses, counts = _LOSSES[kind](*_terms(kind, tile).unbind())
    return losses, counts, torch.autograd.grad(losses.sum(), tile.scores)[0]


def in_one_pass(kind, tile):
    both, by_scores = losses_and_derivatives(kind, tile._replace(scores=tile.scores.detach()))
    return *both, by_scores


@pytest.mark.parametrize("scale", [1.0, 30.0, 1000.0])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("kind", ["pairs", "softmax", "sigmoid"])
def test_equals_autograd_over_the_formulas(kind, weights, scale):
    given = tile(kind, torch.float64, scale, WEIGHTS[weights])
    before = given.scores.detach().clone()
    got, want = in_one_pass(kind, given), by_autograd(kind, given)
    assert torch.equal(got[1], want[1])
    for g, w in zip(got[::2], want[::2], strict=True):
        torch.testing.assert_close(g, w, rtol=1e-12, atol=1e-300 if scale == 1000 else 1e-14)
    assert torch.equal(given.scores, before)


@pytest.mark.parametrize("kind", ["pairs", "softmax", "sigmoid"])
def test_float32_keeps_the_digits_of_small_losses(kind):
    """Positives far above: in float32 as near as the inputs allow, however small the loss."""
    found = []
    for dtype in (torch.float32, torch.float64):
        given = tile(kind, torch.float32)
        scores = given.scores.detach() + 25 * given.positive - 25 * given.negative
        given = given._replace(scores=leaf(scores.to(dtype)))
        found.append(in_one_pass(kind, given))
    (losses, _, by_scores), (want, _, by_want) = found
    alone = given.positive.sum(1) == 1  # several positives have a loss of their own
    assert alone.any()
    assert (losses.double() - want)[alone].abs().max() < 1e-5 * want[alone].abs().max()
    assert (by_scores.double() - by_want)[alone].norm() < 1e-5 * by_want[alone].norm()


def test_large_scores_keep_the_digits_of_several_positives():
    found = []
    for dtype in (torch.float32, torch.float64):
        given = tile("softmax", torch.float32)
        scores = given.scores.detach() + 1000 * given.positive
        given = given._replace(scores=leaf(scores.to(dtype)))
        found.append(in_one_pass("softmax", given)[0])
    several = tile("softmax", torch.float32).positive.sum(1) > 1
    assert several.sum() == 2
    torch.testing.assert_close(found[0].double()[several], found[1][several], rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_a_sum_of_weights_that_is_infinite_is_not_hidden(kind):
    """A loss without its positives would look like one."""
    scores, mask = torch.zeros(2, 3), torch.tensor([[True, True, False], [False, False, True]])
    weights = torch.tensor([3e38, 3e38, 1.0])
    both, by_scores = losses_and_derivatives(kind, ScoreTile(scores, mask, ~mask, weights))
    assert both[0].isnan().tolist() == [True, False]
    assert by_scores[1].isfinite().all()


def test_what_is_left_to_autograd():
    given = tile("softmax", torch.float64)
    assert has_one_pass(given)
    assert not has_one_pass(ScoreTile(*(x[:, :1] for x in given[:3]), None))
    assert not has_one_pass(ScoreTile(*(x[:0] for x in given[:3]), None))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("columns", [2, 33, 700, 4096, 8192])
@pytest.mark.parametrize("kind", ["pairs", "softmax", "sigmoid"])
def test_the_kernel_equals_plain_torch_in_float64(kind, columns):
    from allgrad.losses._tiles.fused_rows import losses_of_rows

    scores = 10 * random((37, columns), 1).cuda().float()
    positive = torch.zeros(37, columns, dtype=torch.bool, device="cuda")
    positive[torch.arange(37), torch.arange(37) % columns] = True
    if kind != "pairs":
        positive[5], positive[6, ::2] = False, True
    negative = ~positive
    negative[7], negative[8, 1::2] = False, False
    weights = None if kind == "pairs" else (random((columns,), 2).abs() + 0.1).cuda().float()
    both, by_scores = losses_of_rows(kind, scores, positive, negative, weights)
    wide = ScoreTile(
        scores.double(), positive, negative, None if weights is None else weights.double()
    )
    losses, counts, want = _KINDS[kind](wide)
    assert torch.equal(both[1].double(), counts[:, 0])
    torch.testing.assert_close(both[0].double(), losses[:, 0], rtol=3e-6, atol=1e-30)
    torch.testing.assert_close(by_scores.double(), want, rtol=2e-5, atol=1e-30)
