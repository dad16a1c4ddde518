"""A Triton kernel over whole rows of scores: the loss of each row, and its derivative by each score.

A program has one row in registers. The formulas are those of ``_rows/whole_rows``. Inside, exponentials and
logarithms are to base 2; a highest score is subtracted before the change of base, which is exact.
"""

# mypy: ignore-errors
# ruff: noqa: N803, PLR0917
from __future__ import annotations

import triton
import triton.language as tl

from allgrad.losses._tiles.kernel_math import LN2, LOG2E, finite, sigmoid2, softplus2

__all__ = ["row_losses"]

_TENSORS = ("scores", "positive", "negative", "weights", "terms", "by_scores")


@triton.jit
def _shares(score, chosen):
    """The softmax over the chosen scores, the highest of them, and log2 of the sum of the others' parts of it."""
    top = tl.max(tl.where(chosen, score, float("-inf")), 0)
    parts = tl.where(chosen, tl.exp2((score - finite(top)) * LOG2E), 0.0)
    total = tl.sum(parts, 0)
    return tl.div_rn(parts, tl.where(total > 0, total, 1.0)), top, tl.log2(total)


@triton.jit(do_not_specialize=("rows", "columns"), do_not_specialize_on_alignment=_TENSORS)
def row_losses(
    scores, positive, negative, weights, terms, by_scores, rows, columns,
    IS_PAIRS: tl.constexpr, IS_SIGMOID: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Store each row's loss and whether it counts, (2, rows), and the derivatives by the scores."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    inside = offs < columns
    place = row * columns + offs
    score = tl.load(scores + place, mask=inside, other=0.0)
    chosen = tl.load(positive + place, mask=inside, other=0) != 0
    other = tl.load(negative + place, mask=inside, other=0) != 0
    part, counts = tl.where(chosen, 1.0, 0.0), 1.0
    if not IS_PAIRS:
        if HAS_WEIGHTS:
            part *= tl.load(weights + offs, mask=inside, other=0.0)
        weight = tl.sum(part, 0)
        has_positive = weight > 0
        weight += weight - weight  # NaN where it is infinite: the parts would be zeros
        # Rounded as in torch: of a single positive it is exactly one.
        part = tl.where(has_positive, tl.div_rn(part, tl.where(has_positive, weight, 1.0)), 0.0)
    if IS_SIGMOID:
        # No score is both a positive and a negative.
        score = tl.where(chosen, -score, score) * LOG2E
        part = tl.where(other, 1.0, part)
        loss = tl.sum(part * softplus2(score), 0) * LN2
        derivative = part * sigmoid2(score)
        derivative = tl.where(chosen, -derivative, derivative)
    else:
        # Without negatives the logsumexp of these is -inf, and so is the difference.
        of_negatives, top, log_total = _shares(score, other)
        if IS_PAIRS:
            pair = tl.sum(tl.where(chosen, score, 0.0), 0)
            difference = (top - pair) * LOG2E + log_total
            loss = softplus2(difference) * LN2
            derivative = (of_negatives - part) * sigmoid2(difference)
        else:
            of_positives, highest, log_positives = _shares(score, chosen)
            highest = finite(highest)
            difference = (top - highest) * LOG2E + (log_total - log_positives)
            distances = tl.where(chosen, score - highest - log_positives * LN2, 0.0)
            loss = softplus2(difference) * LN2 - tl.sum(distances * part, 0)
            # In this order: the first two are equal where there is one positive.
            derivative = of_positives - part
            derivative += (of_negatives - of_positives) * sigmoid2(difference)
            derivative = tl.where(has_positive, derivative, 0.0)
            loss = tl.where(has_positive, loss, 0.0)
            counts = tl.where(has_positive, 1.0, 0.0)
    tl.store(by_scores + place, derivative, mask=inside)
    tl.store(terms + row, loss)
    tl.store(terms + rows + row, counts)
