"""Logits of some words: what the cross entropy over all ranks' words needs of them, in chunks of rows.

    rank 0   logits of words 0 1            logsumexp    the target's logit, or 0    (sum of logits)
    rank 1   logits of words 2 3     --->   logsumexp    the target's logit, or 0    (sum of logits)
    rank 2   logits of word  4              logsumexp    the target's logit, or 0    (sum of logits)

One rank that holds all words and has few logits takes torch's own cross entropy of them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import cross_entropy

from allgrad._autograd.transforms import in_lockstep, is_plain_autograd
from allgrad.losses._rows.recompute import Pulled, keeps, recomputed
from allgrad.losses._rows.row_losses import parts_of
from allgrad.losses._tiles.accumulators import accumulator_dtype
from allgrad.losses._tiles.exponentials import logsumexp

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["is_one_formula", "of_all_words", "sums_of_own_words"]

CHUNK_BYTES = 64 << 20  # of the logits that exist at a time
_IGNORED = -100


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
    counted: Tensor,
    label_smoothing: float,
    reduction: str,
) -> Tensor:
    """Torch's cross entropy of all words' logits, in the accumulators' dtype."""
    # A copy: what the caller changes then is his own.
    targets = torch.where(counted, targets, _IGNORED)
    function = partial(_of_all_words, label_smoothing, reduction)
    given = rows, weight, bias, targets

    def once(needed: Sequence[bool], *inputs: Tensor | None) -> Pulled:
        return Pulled.by_graph(function, inputs, needed)

    return recomputed(function, *given, scores=len(rows) * len(weight), once=once)


def _of_all_words(  # noqa: PLR0917
    label_smoothing: float,
    reduction: str,
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
) -> Tensor:
    return cross_entropy(
        _logits(rows, weight, bias),
        targets,
        ignore_index=_IGNORED,
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
    of_chunk, once = partial(_sums, smoothed), partial(_pulled_sums, smoothed)
    logits = len(rows) * len(weight)
    found = [
        recomputed(of_chunk, at, x, weight, bias, scores=logits, once=once)
        for x, at in zip(parts_of(rows, size), parts_of(own, size), strict=True)
    ]
    return torch.cat(found, 1)


def _sums(smoothed: bool, own: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    logits = _logits(rows, weight, bias)
    parts = [logsumexp(logits, 1), _of_targets(logits, own)]
    return torch.stack([*parts, logits.sum(1)] if smoothed else parts)


def _of_targets(logits: Tensor, own: Tensor) -> Tensor:
    return torch.where(own >= 0, logits.gather(1, own.clamp(min=0)[:, None])[:, 0], 0)


def _pulled_sums(  # noqa: PLR0917
    smoothed: bool,
    needed: Sequence[bool],
    own: Tensor,
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> Pulled:
    """The same with its gradients, in few passes over the logits."""
    _, needs_rows, needs_weight, needs_bias = needed
    logits = _logits(rows, weight, bias)
    top, shares = logits.amax(1), logits.softmax(1)
    none = top == -torch.inf  # a bias may leave out all words of a rank
    if bias is not None:
        shares.masked_fill_(none[:, None], 0)
    lse = torch.where(none, top, top - shares.amax(1).log_())
    parts = [lse, _of_targets(logits, own)]
    result = torch.stack([*parts, logits.sum(1)] if smoothed else parts)

    def pull(by_sums: Tensor) -> list[Tensor | None]:
        by_lse, by_target, *by_sum = by_sums.unbind()
        by_logits = shares.mul_(by_lse[:, None])
        if by_sum:
            by_logits += by_sum[0][:, None]
        at_target = torch.where(own >= 0, by_target, 0)[:, None]
        by_logits.scatter_add_(1, own.clamp(min=0)[:, None], at_target)
        narrow = by_logits.to(rows.dtype)
        by_rows = narrow @ weight.to(rows.dtype) if needs_rows else None
        by_weight = (narrow.T @ rows).to(weight.dtype) if needs_weight else None
        by_bias = by_logits.sum(0).to(bias.dtype) if bias is not None and needs_bias else None
        return [None, by_rows, by_weight, by_bias]

    return Pulled(result, pull)
