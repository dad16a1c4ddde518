"""A term of the loss for each row of scores, from chunks of rows and columns that are not kept.

For a chunk of rows and a chunk of columns three numbers are added up for each row, over columns:

    softmax    logsumexp of positives and negatives   weighted sum of positive scores   weight
    sigmoid    -log sigmoid(-score) of negatives      the same of positives, weighted   weight

The numbers of all column chunks are combined, and give the row's loss. The scores of a chunk are
computed again in backward.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from allgrad.losses._recompute import recomputed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Activation", "row_losses", "terms_of", "weighted_sums"]

Activation: TypeAlias = Literal["softmax", "sigmoid"]
R = TypeVar("R")
C = TypeVar("C")

# Finite, unlike -inf, so that a row with no score at all has a derivative.
MASKED = -1e30


def terms_of(
    kind: Activation, scores: Tensor, positive: Tensor, negative: Tensor, weights: Tensor | None
) -> Tensor:
    """The three numbers of each row, (3, rows)."""
    weight = positive.to(scores.dtype)
    if weights is not None:
        weight = weight * weights
    if kind == "softmax":
        among = torch.where(positive | negative, scores, MASKED)
        sums = [among.logsumexp(1), (weight * scores).sum(1)]
    else:
        sums = [
            torch.where(negative, -logsigmoid(-scores), 0).sum(1),
            (weight * -logsigmoid(scores)).sum(1),
        ]
    return torch.stack([*sums, weight.sum(1)])


def row_losses(
    kind: Activation,
    rows: Sequence[tuple[R, Tensor]],
    columns: Sequence[tuple[C, tuple[Tensor, ...]]],
    terms: Callable[..., Tensor],
    *shared: Tensor,
) -> tuple[Tensor, Tensor]:
    """Each row's loss, and whether it has a positive.

    ``terms(row, column, tensor of the row chunk, *tensors of the column chunk, *shared)`` gives the
    three numbers of a row chunk. There is at least one chunk of each, which may be empty, so that a
    rank without rows takes part in backward too.
    """
    found = []
    for row, x in rows:
        parts = [recomputed(partial(terms, row, column), x, *ys, *shared) for column, ys in columns]
        first, positive, weight = torch.stack(parts, 1)
        found.append((_combine(kind, first), positive.sum(0), weight.sum(0)))
    first, positive, weight = (_join(one) for one in zip(*found, strict=True))
    has_positive = weight > 0
    positive = torch.where(has_positive, positive / torch.where(has_positive, weight, 1), 0)
    if kind == "softmax":
        return torch.where(has_positive, first - positive, 0), has_positive
    return first + positive, has_positive


def _join(chunks: Sequence[Tensor]) -> Tensor:
    # Torch cuts the graph of the gradient behind a cat of an empty vector. A rank without rows has
    # one chunk, and takes part in the second derivative too (the kind "empty" of the tests).
    return chunks[0] if len(chunks) == 1 else torch.cat(list(chunks))


def _combine(kind: Activation, by_chunk: Tensor) -> Tensor:
    return by_chunk.logsumexp(0) if kind == "softmax" else by_chunk.sum(0)


def weighted_sums(losses: Tensor, counted: Tensor, weights: Tensor | None) -> Tensor:
    """The weighted sum of the losses of rows that count, and the sum of the weights."""
    weight = counted.to(losses.dtype)
    if weights is not None:
        weight = weight * weights.to(weight.dtype)  # the dtype of a loss is that of its features
    return torch.stack([(weight * losses).sum(), weight.sum()])
