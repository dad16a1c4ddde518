"""The losses as plain formulas: one process, all pairs, the whole score matrix.

Row i of the scores is query i, column j is key j, and query i and key i are a pair. Tests and
benchmarks compare with these. They have derivatives of any order and need memory for B x B scores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "clip",
    "cross_entropy",
    "info_nce",
    "maxsim",
    "multiple_negatives",
    "siglip",
    "sigmoid_supcon",
    "supcon",
]


def clip(
    image: Tensor, text: Tensor, scale: Tensor | float, *, label_smoothing: float = 0.0
) -> Tensor:
    """The mean of two cross entropies: each image among all texts, each text among all images."""
    scores = scale * image @ text.T
    return (_cross_entropy(scores, label_smoothing) + _cross_entropy(scores.T, label_smoothing)) / 2


def cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """Torch's own, of all words' logits."""
    logits = functional.linear(hidden, weight, bias)
    losses = functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        targets.flatten(),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )
    return losses.reshape(targets.shape) if reduction == "none" else losses


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


def supcon(
    query: Tensor,
    key: Tensor,
    scale: Tensor | float,
    query_ids: Tensor,
    key_ids: Tensor,
    *,
    query_weights: Tensor | None = None,
    key_weights: Tensor | None = None,
    exclude_self: bool = False,
    margin: float | None = None,
) -> Tensor:
    """Cross entropy of each query's positives: keys with its id. The mean over queries with one."""
    similarity = query @ key.T
    positive, negative = _by_ids(similarity, query_ids, key_ids, exclude_self, margin)
    scores = scale * similarity
    among = scores.masked_fill(~(positive | negative), -torch.inf)
    log_probabilities = scores - among.logsumexp(1, keepdim=True)
    losses = -_positive_mean(log_probabilities, positive, key_weights)
    counted = (positive * (1 if key_weights is None else key_weights)).sum(1) > 0
    weight = torch.ones_like(losses) if query_weights is None else query_weights
    return (weight * losses)[counted].sum() / weight[counted].sum()


def sigmoid_supcon(
    query: Tensor,
    key: Tensor,
    scale: Tensor | float,
    query_ids: Tensor,
    key_ids: Tensor,
    *,
    bias: Tensor | float = 0.0,
    query_weights: Tensor | None = None,
    key_weights: Tensor | None = None,
    exclude_self: bool = False,
    margin: float | None = None,
) -> Tensor:
    """Binary cross entropy of each query and key; a query's k positives count 1/k each."""
    similarity = query @ key.T
    positive, negative = _by_ids(similarity, query_ids, key_ids, exclude_self, margin)
    scores = scale * similarity + bias
    losses = -torch.where(negative, functional.logsigmoid(-scores), 0).sum(1)
    losses = losses - _positive_mean(functional.logsigmoid(scores), positive, key_weights)
    weight = torch.ones_like(losses) if query_weights is None else query_weights
    return (weight * losses).sum() / weight.sum()


def multiple_negatives(
    query: Tensor,
    key: Tensor,
    scale: Tensor | float,
    *,
    negatives: Tensor | None = None,
    symmetric: bool = False,
    ids: Tensor | None = None,
    negative_ids: Tensor | None = None,
    weights: Tensor | None = None,
    margin: float | None = None,
) -> Tensor:
    """Cross entropy of each query among all keys and further negatives: hard ones, or a queue."""
    candidates = key if negatives is None else torch.cat([key, negatives])
    candidate_ids = ids
    if ids is not None and negative_ids is not None:
        candidate_ids = torch.cat([ids, negative_ids])
    losses = _pair_losses(query, candidates, scale, ids, candidate_ids, margin)
    if symmetric:
        losses = (losses + _pair_losses(key, query, scale, ids, ids, margin)) / 2
    weight = torch.ones_like(losses) if weights is None else weights
    return (weight * losses).sum() / weight.sum()


def maxsim(
    query: Sequence[Tensor],
    document: Sequence[Tensor],
    scale: Tensor | float = 1.0,
    *,
    symmetric: bool = False,
) -> Tensor:
    """Cross entropy of each query among all documents, scored by late interaction."""
    rows = [torch.stack([(q @ d.T).amax(1).sum() for d in document]) for q in query]
    scores = scale * torch.stack(rows)
    loss = _cross_entropy(scores, 0.0)
    return (loss + _cross_entropy(scores.T, 0.0)) / 2 if symmetric else loss


def _by_ids(
    similarity: Tensor,
    query_ids: Tensor,
    key_ids: Tensor,
    exclude_self: bool,
    margin: float | None,
) -> tuple[Tensor, Tensor]:
    same = query_ids[:, None] == key_ids
    own = torch.zeros_like(same)
    if exclude_self:
        own.fill_diagonal_(True)
    positive, negative = same & ~own, ~same & ~own
    if margin is not None:
        highest = similarity.detach().masked_fill(~positive, -torch.inf).amax(1, keepdim=True)
        limit = torch.where(highest > -torch.inf, highest - margin, torch.inf)
        negative &= similarity.detach() <= limit
    return positive, negative


def _positive_mean(values: Tensor, positive: Tensor, key_weights: Tensor | None) -> Tensor:
    weight = positive.to(values.dtype) * (1 if key_weights is None else key_weights)
    total = weight.sum(1)
    mean = (weight * values).sum(1) / torch.where(total > 0, total, 1)
    return torch.where(total > 0, mean, 0)


def _pair_losses(  # noqa: PLR0917
    query: Tensor,
    candidates: Tensor,
    scale: Tensor | float,
    query_ids: Tensor | None,
    ids: Tensor | None,
    margin: float | None,
) -> Tensor:
    similarity = query @ candidates.T
    left_out = torch.zeros_like(similarity, dtype=torch.bool)
    if query_ids is not None and ids is not None:
        left_out |= query_ids[:, None] == ids
    if margin is not None:
        left_out |= similarity.detach() > similarity.detach().diagonal()[:, None] - margin
    left_out.fill_diagonal_(False)
    scores = (scale * similarity).masked_fill(left_out, -torch.inf)
    targets = torch.arange(len(query), device=scores.device)
    return functional.cross_entropy(scores, targets, reduction="none")


def _cross_entropy(scores: Tensor, label_smoothing: float) -> Tensor:
    targets = torch.arange(len(scores), device=scores.device)
    return functional.cross_entropy(scores, targets, label_smoothing=label_smoothing)
