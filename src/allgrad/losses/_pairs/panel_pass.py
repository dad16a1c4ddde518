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
from allgrad.losses._kind import LossKind
from allgrad.losses._pairs.column_sums import softplus
from allgrad.losses._pairs.key_sums import KeySums
from allgrad.losses._tiles.accumulators import accumulator_dtype, panels
from allgrad.losses._tiles.cpu_bfloat16 import multiplies_bfloat16, multiplies_twice
from allgrad.losses._tiles.torch import row_dots, scores_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from allgrad.losses._pairs.config import LossConfig

__all__ = ["PanelPass", "has_panels"]

aten = torch.ops.aten

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
        self.dtype, self.gain = accumulator_dtype(q.dtype), config.mean_factor * scale
        self.joined, self.narrow = joined, multiplies_bfloat16(q)
        # The scores of pairs: those of a product in the accumulators' dtype, or of more digits.
        self.exact = not multiplies_twice(q)
        wide = joined.to(self.dtype) if self.exact else joined
        self.score_keys, self.gradient_keys = wide, joined if self.narrow else wide
        self.pairs = scale.new_empty(q.shape[0]) if self.exact else row_dots(q, k).mul_(scale)
        if not self.exact and bias is not None:
            self.pairs.add_(bias)
        self.by_pair = torch.empty_like(self.pairs)  # the derivatives by these
        self.loss = scale.new_zeros(())  # the sum of this rank's terms

    def run(self, needed: Sequence[bool]) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """The loss, and its gradients by queries, keys, scale and bias."""
        config, layout, q = self.config, self.config.layout, self.q
        count, columns = q.shape[0], self.joined.shape[0]
        height = min(count, max(PANEL_SCORES // columns, FEWEST_ROWS))
        sigmoid = config.kind is LossKind.SIGMOID
        terms: Callable[..., Tensor] = self._sigmoid if sigmoid else self._softmax
        memory = [self.scale.new_empty(height, columns) for _ in range(3 if sigmoid else 2)]
        by_query, by_key = None, None
        if config.needs_grad and (needed[0] or needed[2]):
            by_query = torch.empty_like(q, dtype=self.dtype)
        if config.needs_grad and config.needs_key_grad:
            by_key = KeySums(layout, self.joined.shape[1], self.scale)
        self.by_bias = self.scale.new_zeros(()) if self.bias is not None and needed[3] else None
        for rows in panels(count, max(1, height)):
            own, size = q[rows], rows.stop - rows.start
            scores, *spare = memory if size == height else [x[:size] for x in memory]
            scores_of(own, self.score_keys, self.scale, self.bias, out=scores)
            first = layout.start + rows.start
            self._take_pairs(scores.diagonal(first), rows)
            weights = terms(scores, *spare, rows)
            if self.narrow and config.needs_grad:
                weights = weights.to(self.gradient_keys.dtype)
            else:
                weights.diagonal(first).copy_(self.by_pair[rows])
            if by_key is not None:
                by_key.add_product(weights, own.to(weights.dtype), self.gain)
                if rows.stop == count:
                    # The message travels while the last product is computed.
                    self._start_keys(by_key, overlaps=by_query is not None)
            if by_query is not None and self.narrow:
                by_query[rows] = torch.mm(weights, self.gradient_keys)
            elif by_query is not None:
                torch.mm(weights, self.gradient_keys, out=by_query[rows])
        if by_key is not None and not count:
            by_key.message.zero_()
            self._start_keys(by_key, overlaps=False)
        return self._of_all_ranks(by_query, by_key, needed)

    def _take_pairs(self, pairs: Tensor, rows: slice) -> None:
        if self.exact:
            self.pairs[rows] = pairs
        pairs.fill_(-torch.inf)  # they count apart

    def _sigmoid(self, scores: Tensor, weights: Tensor, spare: Tensor, rows: slice) -> Tensor:
        """Add a panel's terms to the loss; the derivatives by its scores, 0 at pairs."""
        # log(1 + exp(score)) = -logsigmoid(-score), whose exponentials serve its derivative too.
        aten.log_sigmoid_forward.output(scores.neg_(), output=weights, buffer=spare)
        self.loss -= weights.sum()
        one = self.loss.new_ones(()).expand_as(scores)
        aten.log_sigmoid_backward.grad_input(one, scores, spare, grad_input=weights)
        away = -self.pairs[rows]
        self.loss += softplus(away).sum()
        by_pair = self.by_pair[rows] = away.sigmoid_().neg_()
        if self.by_bias is not None:
            self.by_bias += weights.sum() + by_pair.sum()
        return weights

    def _softmax(self, scores: Tensor, weights: Tensor, rows: slice) -> Tensor:
        """The same."""
        highest = scores.amax(1)
        torch.softmax(scores, 1, out=weights)
        if len(self.joined) > 1:
            negatives = highest.sub_(weights.amax(1).log_())
        else:
            negatives = highest  # of nothing: -inf
            weights.zero_()
        differences = negatives.sub_(self.pairs[rows])
        self.loss += softplus(differences).sum()
        lost = differences.sigmoid_()
        by_pair = torch.neg(lost, out=self.by_pair[rows])
        smoothing = self.config.smoothing
        if smoothing:
            by_pair += smoothing
            every = self.scale * self._sum(self.q[rows]).dot(self._sum(self.joined))
            self.loss += smoothing * (self.pairs[rows].sum() - every / len(self.joined))
        return weights.mul_(lost.unsqueeze(1)) if self.config.needs_grad else weights

    def _start_keys(self, by_key: KeySums, *, overlaps: bool) -> None:
        """Add to the gradients of keys what products leave out, and send them, with the loss."""
        smoothing, gain = self.config.smoothing, self.gain
        for block in by_key.blocks() if smoothing else ():
            block.sub_(smoothing / len(self.joined) * gain * self._sum(self.q))
        if self.narrow:
            mine, own = by_key.block(self.config.layout.rank), self.q.to(self.dtype)
            mine[: len(own)].addcmul_((gain * self.by_pair).unsqueeze(1), own)
        by_key.start(self.loss, overlaps=overlaps)

    def _finish_queries(self, by_query: Tensor) -> None:
        """The same for queries."""
        if self.config.smoothing:
            by_query -= self.config.smoothing / len(self.joined) * self._sum(self.joined)
        if self.narrow:
            pairs = self.k[: len(self.q)].to(self.dtype)
            by_query.addcmul_(self.by_pair.unsqueeze(1), pairs)

    def _sum(self, x: Tensor) -> Tensor:
        return x.sum(0, dtype=self.dtype)

    def _of_all_ranks(
        self, by_query: Tensor | None, by_key: KeySums | None, needed: Sequence[bool]
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        layout, factor, loss = self.config.layout, self.config.mean_factor, self.loss
        by_scale = None
        if by_query is not None:
            self._finish_queries(by_query)
            if needed[2]:
                by_scale = torch.dot(by_query.flatten(), self.q.to(self.dtype).flatten()) * factor
            by_query = by_query.mul_(self.gain) if needed[0] else None
        own = None
        if by_key is not None:
            own, loss = by_key.wait()
        elif layout.world > 1:
            loss = all_reduce(loss, group=layout.group, grad="none")
        by_bias = None if self.by_bias is None else self.by_bias * factor
        return loss * factor, (by_query, own if needed[1] else None, by_scale, by_bias)
