"""The term of a pair in a softmax: log(1 + exp(negatives - score of the pair)).

``negatives`` is the logsumexp of the other scores of its row or column; the pair's own is set to -inf there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["negatives_and_weights", "softplus"]


def negatives_and_weights(
    scores: Tensor, dim: int, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``negatives`` of each row (dim 1) or column (dim 0), and the softmax, in the memory of ``out``.

    Scores minus a rounded logsumexp would lose the digits that the scores are larger by; the softmax
    subtracts the highest score, which is exact (test_large_scores_keep_their_digits).
    """
    highest = scores.amax(dim)
    weights = torch.softmax(scores, dim, out=out)
    if scores.shape[dim] > 1:
        return highest.sub_(weights.amax(dim).log_()), weights
    return highest, weights.zero_()  # of nothing: -inf


def softplus(x: Tensor, out: Tensor | None = None) -> Tensor:
    """log(1 + exp(x)); above 50 that is x, to the last digit of float64."""
    if out is None:
        return torch.nn.functional.softplus(x, threshold=50)
    return torch.ops.aten.softplus.out(x, 1, 50, out=out)  # type: ignore[no-any-return]
