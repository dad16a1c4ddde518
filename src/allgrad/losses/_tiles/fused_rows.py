"""The losses of whole rows of scores, and their derivatives, in one launch.

What takes some twenty passes over the scores in plain torch reads them once and writes the derivatives once.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from allgrad.losses._tiles import row_kernels as kernels
from allgrad.losses._tiles.launches import launch

if TYPE_CHECKING:
    from torch import Tensor

    from allgrad.losses._kind import Activation

__all__ = ["losses_of_rows"]


def losses_of_rows(
    kind: Activation, scores: Tensor, positive: Tensor, negative: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Each row's loss and whether it counts, (2, rows); the derivative of each loss by its scores."""
    scores = scores.contiguous()
    masks = (x.contiguous().view(torch.uint8) for x in (positive, negative))
    rows, columns = scores.shape
    both, by_scores = scores.new_empty(2, rows), torch.empty_like(scores)
    by_column = None if weights is None else weights.contiguous()
    block, num_warps = _block(columns)
    launch(
        kernels.row_losses,
        (rows, 1, 1),
        (scores, *masks, by_column, both, by_scores, rows, columns),
        (kind == "pairs", kind == "sigmoid", weights is not None, block),
        scores.device,
        num_warps=num_warps,
    )
    return both, by_scores


@lru_cache(maxsize=256)
def _block(columns: int) -> tuple[int, int]:
    """A power of two that holds a row, and the warps that share it: at most 8 scores for each thread."""
    block = max(32, 1 << (columns - 1).bit_length())
    return block, max(4, block // 256)
