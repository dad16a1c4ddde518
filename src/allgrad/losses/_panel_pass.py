"""Softmax along rows and sigmoid on CPUs: forward computes the gradients too, some rows at a time.

                 keys of rank 0    of rank 1    of rank 2
    panel        [ scores          scores       scores ]     some of this rank's queries
    next panel   [ scores          scores       scores ]     the next of them

Neither loss needs the scores of other ranks. So one pass gives the loss, and the gradients before the
ranks' weights of the loss, which backward adds up. Each score is computed once, in the memory of the
panel before, and none is kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from allgrad.collectives.all_reduce import all_reduce
from allgrad.losses._column_sums import softplus
from allgrad.losses._key_blocks import KeySums
from allgrad.losses._kind import LossKind
from allgrad.losses._tiles.accumulators import accumulator_dtype, panels
from allgrad.losses._tiles.cpu_bfloat16 import multiplies_bfloat16, multiplies_twice
from allgrad.losses._tiles.torch import row_dots, scores_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from allgrad.losses._config import LossConfig

__all__ = ["PanelPass", "has_panels"]

PANEL_SCORES = 2**21
FEWEST_ROWS = 128  # with fewer, the sums for all keys would be read and written too often


def has_panels(config: LossConfig, q: Tensor, *, ring: bool) -> bool:
    return config.kind is not LossKind.SOFTMAX_BOTH and q.device.type == "cpu" and not ring


class PanelPass:
    """One pass over the scores of this rank's queries and all keys, which are ``joined``."""

    def __init__(  # noqa: PLR0917
        self,
        config: LossConfig,
        q: Tensor,
        k: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        joined: Tensor,
    ) -> None:
        self.config, self.q, self.k, self.scale, self.bias = config, q, k, scale, bias
        self.dtype = accumulator_dtype(q.dtype)
        self.joined, self.narrow = joined, multiplies_bfloat16(q)
        wide = joined if multiplies_twice(q) else joined.to(self.dtype)
        self.score_keys, self.gradient_keys = wide, joined if self.narrow else wide
        self.pairs = row_dots(q, k).mul_(scale)
        if bias is not None:
            self.pairs.add_(bias)
        self.by_pair = torch.empty_like(self.pairs)  # the derivatives by the scores of pairs
        self.loss = scale.new_zeros(())  # the sum of this rank's terms
        self.by_bias = scale.new_zeros(())

    def run(self, needed: Sequence[bool]) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """The loss, and its gradients by queries, keys, scale and bias."""
        config, layout, columns = self.config, self.config.layout, len(self.joined)
        height = min(len(self.q), max(PANEL_SCORES // columns, FEWEST_ROWS))
        memory = self.scale.new_empty(2, height, columns)
        by_query, by_key = None, None
        if config.needs_grad and (needed[0] or needed[2]):
            by_query = torch.empty_like(self.q, dtype=self.dtype)
        if config.needs_grad and config.needs_key_grad:
            by_key = KeySums(layout, self.joined.shape[1], self.scale)
        for rows in panels(len(self.q), max(1, height)):
            own = self.q[rows]
            scores, spare = memory[:, : len(own)]
            scores_of(own, self.score_keys, self.scale, self.bias, out=scores)
            scores.diagonal(layout.start + rows.start).fill_(-torch.inf)  # pairs count apart
            if config.kind is LossKind.SIGMOID:
                weights = self._sigmoid(scores, spare, rows)
            else:
                weights = self._softmax(scores, rows)
            if config.needs_grad:
                weights = weights.to(self.gradient_keys.dtype)
            if by_query is not None and self.narrow:
                by_query[rows] = torch.mm(weights, self.gradient_keys)
            elif by_query is not None:
                torch.mm(weights, self.gradient_keys, out=by_query[rows])
            if by_key is not None:
                by_key.add_product(weights, own.to(weights.dtype))
        if by_key is not None and by_key.is_empty:  # no queries
            by_key.message.zero_()
        self._add_smoothing(by_query, by_key)
        return self._of_all_ranks(by_query, by_key, needed)

    def _sigmoid(self, scores: Tensor, spare: Tensor, rows: slice) -> Tensor:
        """Add a panel's terms to the loss; the derivatives by its scores, 0 at pairs."""
        pairs, weights = self.pairs[rows], torch.sigmoid(scores, out=spare)
        self.by_pair[rows] = -torch.sigmoid(-pairs)
        self.by_bias += weights.sum() + self.by_pair[rows].sum()
        # log(1 + exp(score)) is the score, or 0, and -log(1 - p) with p of the smaller side.
        self.loss += softplus(-pairs).sum() + scores.clamp_(min=0).sum()
        smaller = torch.minimum(
            torch.sub(self.loss.new_ones(()), weights, out=scores), weights, out=scores
        )
        self.loss -= smaller.neg_().log1p_().sum()
        return weights

    def _softmax(self, scores: Tensor, rows: slice) -> Tensor:
        """The same."""
        pairs, highest = self.pairs[rows], scores.amax(1)
        highest.masked_fill_(highest == -torch.inf, 0)  # no negatives
        weights = scores.sub_(highest.unsqueeze(1)).exp_()
        negatives = weights.sum(1).log_().add_(highest)
        differences = negatives - pairs
        self.loss += softplus(differences).sum()
        self.by_pair[rows] = -differences.sigmoid()
        factors = highest.sub_(torch.logaddexp(negatives, pairs)).exp_()
        return weights.mul_(factors.unsqueeze(1)) if self.config.needs_grad else weights

    def _add_smoothing(self, by_query: Tensor | None, by_key: KeySums | None) -> None:
        """Label smoothing, and what the pairs add to the gradients."""
        smoothing = self.config.smoothing
        own = self.q.to(self.dtype)
        if smoothing:
            query_sum, key_sum = own.sum(0), self.joined.sum(0, dtype=self.dtype)
            each = smoothing / len(self.joined)
            self.loss += smoothing * self.pairs.sum() - each * self.scale * query_sum.dot(key_sum)
            self.by_pair += smoothing
            if by_query is not None:
                by_query -= each * key_sum
            for block in () if by_key is None else by_key.blocks:
                block.sub_(each * query_sum)
        by_pair = self.by_pair.unsqueeze(1)
        if by_query is not None:
            by_query.addcmul_(by_pair, self.k[: len(own)].to(self.dtype))
        if by_key is not None:
            by_key.blocks[self.config.layout.rank][: len(own)].addcmul_(by_pair, own)

    def _of_all_ranks(
        self, by_query: Tensor | None, by_key: KeySums | None, needed: Sequence[bool]
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        layout, factor, loss = self.config.layout, self.config.mean_factor, self.loss
        gain = factor * self.scale
        by_scale = None
        if by_query is not None and needed[2]:
            by_scale = torch.dot(by_query.flatten(), self.q.to(self.dtype).flatten()) * factor
        own = None
        if by_key is not None:
            by_key.message.mul_(gain)
            own, loss = by_key.reduce(loss)
        elif layout.world > 1:
            loss = all_reduce(loss, group=layout.group, grad="none")
        by_query = by_query.mul_(gain) if by_query is not None and needed[0] else None
        by_bias = self.by_bias * factor if self.bias is not None and needed[3] else None
        return loss * factor, (by_query, own if needed[1] else None, by_scale, by_bias)
