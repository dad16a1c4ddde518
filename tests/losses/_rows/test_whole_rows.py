"""One pass over whole rows: the losses and derivatives of the formulas that autograd differentiates."""

import pytest
import torch

from allgrad.losses._rows.row_losses import _LOSSES, _terms
from allgrad.losses._rows.score_tile import ScoreTile
from allgrad.losses._rows.whole_rows import has_one_pass, losses_in_one_pass
from exactness import leaf, random


def tile(kind, dtype, scale=1.0, weights=None):
    """Rows of every sort: one positive, several, no negative, no positive, neither."""
    scores = leaf((scale * random((6, 7), 1)).to(dtype))
    positive = torch.zeros(6, 7, dtype=torch.bool)
    positive[torch.arange(6), torch.tensor([3, 0, 6, 1, 2, 5])] = True
    negative = ~positive
    if kind != "pairs":
        positive[1, 4:], positive[3, :], positive[4:] = True, True, False
        negative = ~positive
    negative[3], negative[5], negative[0, :3] = False, False, False
    return ScoreTile(scores, positive, negative, weights)


WEIGHTS = {
    "none": None,
    "some": torch.tensor([0.5, 2.0, 0.0, 3.0, 1.0, 0.25, 1.5], dtype=torch.float64),
    "zero": torch.zeros(7, dtype=torch.float64),
    "negative": torch.tensor([-1.0, 2.0, -3.0, -1.0, -0.5, 1.0, 1.0], dtype=torch.float64),
}


def derived(found, tile):
    losses, weight = found.unbind()
    by_losses = random((6,), 5).to(losses.dtype)
    return losses, weight > 0, torch.autograd.grad(losses, tile.scores, by_losses)[0]


@pytest.mark.parametrize("scale", [1.0, 30.0, 1000.0])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("kind", ["pairs", "softmax", "sigmoid"])
def test_equals_autograd_over_the_formulas(kind, weights, scale):
    given = tile(kind, torch.float64, scale, WEIGHTS[weights])
    before = given.scores.detach().clone()
    got = derived(losses_in_one_pass(kind, given), given)
    want = derived(torch.stack(_LOSSES[kind](*_terms(kind, given).unbind())), given)
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
        found.append(derived(losses_in_one_pass(kind, given), given))
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
        found.append(losses_in_one_pass("softmax", given)[0])
    several = tile("softmax", torch.float32).positive.sum(1) > 1
    assert several.sum() == 2
    torch.testing.assert_close(found[0].double()[several], found[1][several], rtol=1e-6, atol=0)


def test_what_is_left_to_autograd():
    given = tile("softmax", torch.float64)
    assert has_one_pass(given)
    assert not has_one_pass(given._replace(scores=given.scores.detach()))
    assert not has_one_pass(given._replace(weights=leaf(torch.ones(7))))
    assert not has_one_pass(ScoreTile(*(x[:, :1] for x in given[:3]), None))
    assert not has_one_pass(ScoreTile(*(x[:0] for x in given[:3]), None))


def test_a_second_derivative_raises():
    given = tile("softmax", torch.float64)
    losses = losses_in_one_pass("softmax", given)[0]
    (first,) = torch.autograd.grad(losses.square().sum(), given.scores, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
