"""A small batch on CPUs: every rank computes the scores of all pairs, which saves a message.

    rank 0   [ a a ]                [ a a | b | c c c ]  queries and keys, in one message
    rank 1   [ b ]         --->     [ a a | b | c c c ]
    rank 2   [ c c c ]              [ a a | b | c c c ]

So each rank knows the loss, and the gradients of its own features before the ranks' weights of the
loss, which backward adds up. That is two messages for a step instead of three, and none is large.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from allgrad.losses._arguments.packed import gather_rows
from allgrad.losses._kind import LossKind
from allgrad.losses._pairs.key_blocks import needs_ring
from allgrad.losses._pairs.pair_terms import negatives_and_weights, softplus
from allgrad.losses._tiles.accumulators import accumulator_dtype, times

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from allgrad.losses._pairs.config import LossConfig

__all__ = ["is_few", "is_small", "loss_and_gradients", "times_weight"]

# Up to so many multiplications for the scores of all pairs. Above, the ranks share the work. The
# exponentials of a score, and what is made of them, take about as long as so many more.
SMALL_UP_TO, EXPONENTIALS = 2**25, 128


def is_small(config: LossConfig, q: Tensor) -> bool:
    """Whether the scores of all pairs are computed by every rank; the same on all ranks."""
    sizes = config.layout.sizes
    return (
        len(sizes) > 1
        and not needs_ring(config.layout, q, config.budget, config.ring)
        and not config.label_smoothing
        and config.pairs == sizes
        and is_few(sum(sizes), q.shape[1])
        and q.device.type == "cpu"
    )


def is_few(pairs: int, width: int) -> bool:
    """Whether the scores of so many pairs, of all ranks, are computed by each."""
    return pairs**2 * (width + EXPONENTIALS) <= SMALL_UP_TO


def loss_and_gradients(  # noqa: PLR0917
    config: LossConfig,
    q: Tensor,
    k: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    needed: Sequence[bool],
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """The loss, and its gradients by this rank's queries, keys, scale and bias.

    The gradients lack the factor of the mean, those of features the scale too (``times_weight``).
    """
    layout, width, dtype = config.layout, q.shape[1], accumulator_dtype(q.dtype)
    both = torch.cat((q, k), 1)
    both = gather_rows(both, layout.sizes, layout.group, config.agreed)
    if both.dtype is not dtype:
        both = both.to(dtype)
    queries, keys = both[:, :width], both[:, width:]
    # Selective checkpointing may save a product (mm), but not what is changed in place later
    # (test_a_region_that_saves_products_equals_the_formula).
    scores = both.new_empty(len(both), len(both))
    torch.mm(queries, keys.T, out=scores).mul_(scale)
    if config.kind is LossKind.SIGMOID:
        loss, by_score = _sigmoid(scores, bias, config.needs_grad)
    else:
        loss, by_score = _softmax(config.kind, scores, config.needs_grad)
    loss.mul_(config.mean_factor)
    if by_score is None:
        return loss, (None,) * 4
    start = layout.start
    own = slice(start, start + len(q))
    rows = by_score[own]
    by_query = torch.mm(rows, keys)
    by_scale = by_query.mul(queries[own]).sum() if needed[2] else None
    by_bias = rows.sum() if bias is not None and needed[3] else None
    by_key = torch.mm(by_score[:, own].T, queries) if needed[1] else None
    return loss, (by_query if needed[0] else None, by_key, by_scale, by_bias)


def _sigmoid(scores: Tensor, bias: Tensor | None, needs_grad: bool) -> tuple[Tensor, Tensor | None]:
    """The sum of all terms, and its derivative by each score."""
    if bias is not None:
        scores.add_(bias)
    scores.diagonal().neg_()
    # Not one sum: torch splits a long one by threads, which ranks may have different numbers of.
    loss = softplus(scores).sum(1).sum()
    if not needs_grad:
        return loss, None
    by_score = scores.sigmoid_()
    by_score.diagonal().neg_()
    return loss, by_score


def _softmax(kind: LossKind, scores: Tensor, needs_grad: bool) -> tuple[Tensor, Tensor | None]:
    """The same. Pairs are kept out of the sums, so that a small loss keeps its digits (engine)."""
    pairs = scores.diagonal().clone()
    scores.fill_diagonal_(-torch.inf)
    loss, by_score = _along(scores, 1, pairs, needs_grad)
    if kind is LossKind.SOFTMAX_BOTH:
        of_columns, by_columns = _along(scores, 0, pairs, needs_grad)
        loss.add_(of_columns)
        by_score = None if by_score is None or by_columns is None else by_score.add_(by_columns)
    return loss, by_score


def _along(
    scores: Tensor, dim: int, pairs: Tensor, needs_grad: bool
) -> tuple[Tensor, Tensor | None]:
    negatives, weights = negatives_and_weights(scores, dim)
    differences = negatives.sub_(pairs)
    loss = softplus(differences).sum()
    if not needs_grad:
        return loss, None
    lost = differences.sigmoid_()
    weights.mul_(lost.unsqueeze(dim)).diagonal().sub_(lost)
    return loss, weights


def times_weight(
    config: LossConfig,
    gradients: Sequence[Tensor | None],
    weight: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor | None, ...]:
    """The gradients of all ranks' ``weight`` times the loss; those of features in ``dtype``."""
    by_query, by_key, by_scale, by_bias = gradients
    factor = weight * config.mean_factor
    gain = factor * scale
    return (
        *(None if x is None else times(x, gain, dtype) for x in (by_query, by_key)),
        *(None if x is None else x * factor for x in (by_scale, by_bias)),
    )
