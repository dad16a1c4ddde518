"""The losses as formulas: one process, all pairs, the whole matrix of scores.

Row i of the scores belongs to query i, column j to key j, and pair i is in row i and column i.
Tests and benchmarks compare with these; differentiable to any order, and as large as B x B.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["clip", "info_nce", "siglip"]


def clip(
    image: Tensor, text: Tensor, scale: Tensor | float, *, label_smoothing: float = 0.0
) -> Tensor:
    """Cross entropy of each image among all texts and of each text among all images, averaged."""
    scores = scale * image @ text.T
    return (_own_column(scores, label_smoothing) + _own_column(scores.T, label_smoothing)) / 2


def info_nce(
    query: Tensor,
    key: Tensor,
    scale: Tensor | float,
    hard_negatives: Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cross entropy of each query among all keys and all hard negatives."""
    columns = key if hard_negatives is None else torch.cat([key, hard_negatives.flatten(0, -2)])
    return _own_column(scale * query @ columns.T, label_smoothing)


def siglip(
    image: Tensor, text: Tensor, scale: Tensor | float, bias: Tensor | float = 0.0
) -> Tensor:
    """For each image and text, whether they are a pair: the sum over texts, the mean over images."""
    scores = scale * image @ text.T + bias
    is_pair = 2 * torch.eye(len(image), dtype=scores.dtype, device=scores.device) - 1
    return -functional.logsigmoid(is_pair * scores).sum() / len(image)


def _own_column(scores: Tensor, label_smoothing: float) -> Tensor:
    own = torch.arange(len(scores), device=scores.device)
    return functional.cross_entropy(scores, own, label_smoothing=label_smoothing)
