"""The losses of whole rows of scores, and their derivatives by the scores, in one pass.

                scores of a row               derivative of its loss by one of them
    softmax     positives P, negatives N      positive    exp(s - P) (1 - n) - weight / sum of weights
                n = sigmoid(N - P)            negative    exp(s - N) n
    pairs       one positive, P is its score  positive    -n
                                              negative    exp(s - N) n
    sigmoid                                   positive    -sigmoid(-s) weight / sum of weights
                                              negative    sigmoid(s)

P and N are logsumexps, and the terms of the loss those of row_losses. Where scores are few, autograd over its
formulas takes several times as long. It serves all other derivatives. On a CUDA device one kernel does all of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from allgrad.losses._pairs.pair_terms import negatives_and_weights, softplus
from allgrad.losses._rows.score_tile import ScoreTile, among
from allgrad.losses._tiles.torch import has_triton

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from allgrad.losses._kind import Activation

__all__ = ["has_one_pass", "losses_and_derivatives"]

MOST_COLUMNS = 8192  # that the kernel holds in registers


def has_one_pass(tile: ScoreTile) -> bool:
    """Whether there are rows, and scores to choose among."""
    return tile.scores.shape[0] > 0 and tile.scores.shape[1] > 1


def losses_and_derivatives(kind: Activation, tile: ScoreTile) -> tuple[Tensor, Tensor]:
    """Each row's loss and whether it counts, (2, rows); the derivative of each loss by its scores."""
    if _has_kernel(tile.scores):
        from allgrad.losses._tiles.fused_rows import losses_of_rows

        return losses_of_rows(kind, *tile)
    losses, counts, by_scores = _KINDS[kind](tile)
    return torch.cat([losses, counts], 1).T, by_scores


def _has_kernel(scores: Tensor) -> bool:
    is_float32_on_cuda = scores.is_cuda and scores.dtype == torch.float32
    return is_float32_on_cuda and scores.shape[1] <= MOST_COLUMNS and has_triton()


def _pairs(tile: ScoreTile) -> tuple[Tensor, Tensor, Tensor]:
    own = tile.positives()
    pairs = (own * tile.scores).sum(1, keepdim=True)
    losses, lost, by_negatives = _against_negatives(tile, pairs)
    return losses, torch.ones_like(losses), by_negatives.sub_(own).mul_(lost)


def _softmax(tile: ScoreTile) -> tuple[Tensor, Tensor, Tensor]:
    positive = tile.positives()
    scores = among(tile.scores, positive)
    highest, shares = scores.amax(1, keepdim=True), scores.softmax(1)
    log_highest = shares.amax(1, keepdim=True).log_()
    losses, lost, by_negatives = _against_negatives(tile, highest - log_highest)
    weight, part = _weight_and_part(tile, positive)
    counts = (weight > 0).to(scores.dtype)
    # Not minus a logsumexp, which is rounded: of a single positive the distance is exactly zero.
    distances = scores.sub_(highest).add_(log_highest).mul_(part).sum(1, keepdim=True)
    losses = losses.sub_(distances).mul_(counts)
    lost = lost.mul_(counts)
    # In this order: the first two are equal where there is one positive.
    by_scores = part.neg_().addcmul_(shares, counts)
    by_scores.addcmul_(shares, lost, value=-1).addcmul_(by_negatives, lost)
    return losses, counts, by_scores


def _sigmoid(tile: ScoreTile) -> tuple[Tensor, Tensor, Tensor]:
    scores, others = tile.scores, tile.negatives()
    _, part = _weight_and_part(tile, tile.positives())
    losses = (others * softplus(scores)).add_(part * softplus(-scores)).sum(1, keepdim=True)
    by_scores = others.mul_(scores.sigmoid()).sub_(part.mul_((-scores).sigmoid_()))
    return losses, torch.ones_like(losses), by_scores


_KINDS: dict[Activation, Callable[[ScoreTile], tuple[Tensor, Tensor, Tensor]]] = {
    "pairs": _pairs,
    "softmax": _softmax,
    "sigmoid": _sigmoid,
}


def _against_negatives(tile: ScoreTile, positives: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of positives against negatives, its derivative by these, and theirs by the scores."""
    negatives, shares = negatives_and_weights(among(tile.scores, tile.negatives()), 1)
    differences = negatives.unsqueeze(1).sub_(positives)
    return softplus(differences), differences.sigmoid_(), shares


def _weight_and_part(tile: ScoreTile, positive: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the weights of each row's positives, and the part of it that each has, for ``positive``."""
    each = positive if tile.weights is None else positive.mul_(tile.weights)
    weight = each.sum(1, keepdim=True)
    # Of a sum that is infinite, NaN: its parts would be zeros.
    return weight, each.div_(torch.where(weight > 0, weight + (weight - weight), torch.inf))
