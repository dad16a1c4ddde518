"""The losses as plain formulas: one process, all pairs, the whole score matrix.

Row i of the scores is query i, column j is key j, and query i and key i are a pair. Tests and
benchmarks compare with these. They have derivatives of any order and need memory for B x B scores.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["clip", "info_nce", "siglip"]


def clip(
    image: Tensor, text: Tensor, scale: Tensor | float, *, label_smoothing: float = 0.0
) -> Tensor:
    """The mean of two cross entropies: each image among all texts, each text among all images."""
    scores = scale * image @ text.T
    return (_cross_entropy(scores, label_smoothing) + _cross_entropy(scores.T, label_smoothing)) / 2


def info_nce(
    query: Tensor,
    key: Tensor,
    scale: Tensor | float,
    hard_negatives: Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cross entropy of each query among all keys and all hard negatives."""
    keys = key if hard_negatives is None else torch.cat([key, hard_negatives.flatten(0, -2)])
    return _cross_entropy(scale * query @ keys.T, label_smoothing)


def siglip(
    image: Tensor, text: Tensor, scale: Tensor | float, bias: Tensor | float = 0.0
) -> Tensor:
    """Binary cross entropy of each image and text: the sum over texts, averaged over images."""
    scores = scale * image @ text.T + bias
    sign = 2 * torch.eye(len(image), dtype=scores.dtype, device=scores.device) - 1
    return -functional.logsigmoid(sign * scores).sum() / len(image)


def _cross_entropy(scores: Tensor, label_smoothing: float) -> Tensor:
    targets = torch.arange(len(scores), device=scores.device)
    return functional.cross_entropy(scores, targets, label_smoothing=label_smoothing)
