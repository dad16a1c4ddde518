"""Logits of some words: what the cross entropy over all ranks' words needs of them, in chunks of rows.

    rank 0   logits of words 0 1            logsumexp    the target's logit, or 0    (sum of logits)
    rank 1   logits of words 2 3     --->   logsumexp    the target's logit, or 0    (sum of logits)
    rank 2   logits of word  4              logsumexp    the target's logit, or 0    (sum of logits)

One rank that holds all words and has few logits takes torch's own cross entropy of them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy

from allgrad._autograd.transforms import in_lockstep, is_plain_autograd
from allgrad._core.torch_internals import never_traced
from allgrad.losses._rows.recompute import keeps, recomputed
from allgrad.losses._rows.row_losses import parts_of
from allgrad.losses._tiles.accumulators import accumulator_dtype
from allgrad.losses._tiles.exponentials import logsumexp

__all__ = ["is_one_formula", "of_all_words", "sums_of_own_words"]

CHUNK_BYTES = 64 << 20  # of the logits that exist at a time


def is_one_formula(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether one rank alone computes all logits at once, in plain autograd."""
    if not is_plain_autograd() or in_lockstep():
        return False
    logits = hidden.shape[:-1].numel() * len(weight)
    fits = logits * accumulator_dtype(hidden.dtype).itemsize <= CHUNK_BYTES
    if not fits or not keeps(logits, hidden.device):
        return False
    # A loss requires grad on every rank, or on none.
    given = (hidden, weight) if bias is None else (hidden, weight, bias)
    return not torch.is_grad_enabled() or any(x.requires_grad for x in given)


def of_all_words(  # noqa: PLR0917
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
) -> Tensor:
    """Torch's cross entropy of all words' logits, in the accumulators' dtype."""
    return cross_entropy(
        _logits(rows, weight, bias),
        targets,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )


def _logits(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    wide = accumulator_dtype(rows.dtype)
    logits = (rows @ weight.to(rows.dtype).T).to(wide)
    return logits if bias is None else logits + bias.to(wide)


def sums_of_own_words(
    rows: Tensor, weight: Tensor, bias: Tensor | None, own: Tensor, *, smoothed: bool
) -> Tensor:
    """For each row: logsumexp of the own logits, the target's logit or 0, the sum of own logits."""
    wide = accumulator_dtype(rows.dtype)
    size = max(1, CHUNK_BYTES // (len(weight) * wide.itemsize))
    if len(rows) > size:  # the gradients of chunks are added up
        weight, bias = weight.to(wide), None if bias is None else bias.to(wide)
    of_chunk, once = (partial(_of_logits, sums, smoothed) for sums in (_sums, _sums_in_one_pass))
    logits = len(rows) * len(weight)
    found = [
        recomputed(of_chunk, at, x, weight, bias, scores=logits, once=once)
        for x, at in zip(parts_of(rows, size), parts_of(own, size), strict=True)
    ]
    return torch.cat(found, 1)


def _of_logits(  # noqa: PLR0917
    sums: Any, smoothed: bool, own: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    found: Tensor = sums(_logits(rows, weight, bias), own, smoothed)
    return found


def _sums(logits: Tensor, own: Tensor, smoothed: bool) -> Tensor:
    parts = [logsumexp(logits, 1), _of_targets(logits, own)]
    return torch.stack([*parts, logits.sum(1)] if smoothed else parts)


def _of_targets(logits: Tensor, own: Tensor) -> Tensor:
    return torch.where(own >= 0, logits.gather(1, own.clamp(min=0)[:, None])[:, 0], 0)


def _sums_in_one_pass(logits: Tensor, own: Tensor, smoothed: bool) -> Tensor:
    """The same; differentiable once."""
    found: Tensor = _Sums.apply(logits, own, smoothed)  # type: ignore[no-untyped-call]
    return found


@never_traced
class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, own: Tensor, smoothed: bool) -> Tensor:
        top, shares = logits.amax(1), logits.softmax(1)
        none = top == -torch.inf  # a bias may leave out all words of a rank
        shares.masked_fill_(none[:, None], 0)
        lse = torch.where(none, top, top - shares.amax(1).log_())
        ctx.save_for_backward(shares, own)
        parts = [lse, _of_targets(logits, own)]
        return torch.stack([*parts, logits.sum(1)] if smoothed else parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_sums: Tensor) -> tuple[Tensor | None, ...]:
        shares, own = ctx.saved_tensors
        by_lse, by_target, *by_sum = by_sums.unbind()
        by_logits = shares * by_lse[:, None]
        if by_sum:
            by_logits += by_sum[0][:, None]
        at_target = torch.where(own >= 0, by_target, 0)[:, None]
        return by_logits.scatter_add_(1, own.clamp(min=0)[:, None], at_target), None, None
