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
from allgrad.losses._pairs.key_sums import KeySums
from allgrad.losses._pairs.pair_terms import negatives_and_weights, softplus
from allgrad.losses._tiles.accumulators import accumulator_dtype, panels
from allgrad.losses._tiles.cpu_bfloat16 import multiplies_bfloat16, multiplies_twice
from allgrad.losses._tiles.torch import row_dots, scores_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from allgrad.losses._pairs.config import LossConfig

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
        self.joined, self.narrow = joined, multiplies_bfloat16(q, len(joined))
        self.exact = not multiplies_twice(q, len(joined))
        wide = joined.to(self.dtype) if self.exact else joined
        self.score_keys, self.gradient_keys = wide, joined if self.narrow else wide
        if not self.exact:  # the scores of pairs with more digits
            self.pairs = row_dots(q, k).mul_(scale)
            if bias is not None:
                self.pairs.add_(bias)
        if self.narrow:
            self.by_pair = scale.new_empty(q.shape[0])  # the derivatives by the scores of pairs
        self.terms: list[Tensor] = []  # of the loss, each the sum of a panel
        self.by_bias: list[Tensor] = []  # likewise

    def run(self, needed: Sequence[bool]) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """The loss, and its gradients by queries, keys, scale and bias, for ``times_weight``."""
        config, q = self.config, self.q
        count, columns = q.shape[0], self.joined.shape[0]
        height = min(count, max(PANEL_SCORES // columns, FEWEST_ROWS))
        needs_query = config.needs_grad and (needed[0] or needed[2])
        self.needs_bias = config.needs_grad and self.bias is not None and needed[3]
        add_terms = self._sigmoid if config.kind is LossKind.SIGMOID else self._softmax
        # One allocation: of two, the C library may give pages back and take them anew in each step.
        memory = self.scale.new_empty(2, height, columns)
        by_query, by_key = None, None
        if needs_query:
            by_query = torch.empty_like(q, dtype=self.dtype)
        if config.needs_grad and config.needs_key_grad:
            by_key = KeySums(config.layout, self.joined.shape[1], self.scale)
        for rows in panels(count, max(1, height)):
            own = q if height == count else q[rows]
            scores, spare = memory[:, : len(own)].unbind()
            scores_of(own, self.score_keys, self.scale, self.bias, out=scores)
            weights = add_terms(scores, spare, rows)
            if self.narrow and config.needs_grad:
                weights = self._narrowed(weights, rows)
            if by_key is not None:
                by_key.add_product(weights, own.to(weights.dtype))
                if rows.stop == count:
                    # The message travels while the last product is computed.
                    self._start_keys(by_key, overlaps=needs_query)
            # A product that is changed in place later is not one of mm's own: whole_pass tells why.
            if by_query is not None and self.narrow:
                by_query[rows] = torch.mm(weights, self.gradient_keys)
            elif by_query is not None:
                torch.mm(weights, self.gradient_keys, out=by_query[rows])
        if by_key is not None and not count:
            by_key.message.zero_()
            self._start_keys(by_key, overlaps=False)
        return self._of_all_ranks(by_query, by_key, needed)

    def _pairs_of(self, panel: Tensor, rows: slice) -> Tensor:
        return panel.diagonal(self.config.layout.start + rows.start)

    def _sigmoid(self, scores: Tensor, spare: Tensor, rows: slice) -> Tensor:
        """Add a panel's terms to the loss; the derivatives by its scores."""
        if not self.exact:
            self._pairs_of(scores, rows).copy_(self.pairs[rows])
        # The term of a score is log(1 + exp(score)), that of a pair's log(1 + exp(-score)).
        self._pairs_of(scores, rows).neg_()
        self.terms.append(softplus(scores, out=spare).sum())
        self._pairs_of(scores.sigmoid_(), rows).neg_()
        if self.needs_bias:
            self.by_bias.append(scores.sum())
        return scores

    def _softmax(self, scores: Tensor, weights: Tensor, rows: slice) -> Tensor:
        """The same. Pairs are kept out of the sums, so that a small loss keeps its digits (engine)."""
        of_pairs = self._pairs_of(scores, rows)
        pairs = of_pairs.clone() if self.exact else self.pairs[rows]
        of_pairs.fill_(-torch.inf)
        negatives, _ = negatives_and_weights(scores, 1, out=weights)
        differences = negatives.sub_(pairs)
        self.terms.append(softplus(differences).sum())
        lost = differences.sigmoid_()
        smoothing = self.config.smoothing
        if smoothing:
            every = self.scale * self._sum(self.q[rows]).dot(self._sum(self.joined))
            self.terms.append(smoothing * (pairs.sum() - every / len(self.joined)))
        if self.config.needs_grad:
            weights.mul_(lost.unsqueeze(1))
            self._pairs_of(weights, rows).copy_(
                lost.neg_().add_(smoothing) if smoothing else lost.neg_()
            )
        return weights

    def _narrowed(self, weights: Tensor, rows: slice) -> Tensor:
        """A panel's derivatives in the dtype of its products, but those of pairs, which are kept apart.

        A pair's and the others' nearly cancel: rounded to 16 bits, they would not.
        """
        of_pairs = self._pairs_of(weights, rows)
        self.by_pair[rows] = of_pairs
        of_pairs.zero_()
        return weights.to(self.gradient_keys.dtype)

    def _start_keys(self, by_key: KeySums, *, overlaps: bool) -> None:
        """Add to the gradients of keys what products leave out, and send them, with the loss."""
        smoothing = self.config.smoothing
        for block in by_key.blocks() if smoothing else ():
            block.sub_(smoothing / len(self.joined) * self._sum(self.q))
        if self.narrow:
            mine, own = by_key.block(self.config.layout.rank), self.q.to(self.dtype)
            mine[: len(own)].addcmul_(self.by_pair.unsqueeze(1), own)
        by_key.start(self._total(self.terms), overlaps=overlaps)

    def _finish_queries(self, by_query: Tensor) -> None:
        """The same for queries."""
        if self.config.smoothing:
            by_query -= self.config.smoothing / len(self.joined) * self._sum(self.joined)
        if self.narrow:
            pairs = self.k[: len(self.q)].to(self.dtype)
            by_query.addcmul_(self.by_pair.unsqueeze(1), pairs)

    def _total(self, parts: Sequence[Tensor]) -> Tensor:
        return sum(parts[1:], start=parts[0]) if parts else self.scale.new_zeros(())

    def _sum(self, x: Tensor) -> Tensor:
        return x.sum(0, dtype=self.dtype)

    def _of_all_ranks(
        self, by_query: Tensor | None, by_key: KeySums | None, needed: Sequence[bool]
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        layout, by_scale = self.config.layout, None
        if by_query is not None:
            self._finish_queries(by_query)
            if needed[2]:
                by_scale = torch.dot(by_query.flatten(), self.q.to(self.dtype).flatten())
        own = None
        if by_key is not None:
            own, loss = by_key.wait()
        else:
            loss = self._total(self.terms)
            if layout.world > 1:
                loss = all_reduce(loss, group=layout.group, grad="none")
        by_bias = self._total(self.by_bias) if self.needs_bias else None
        gradients = by_query if needed[0] else None, own if needed[1] else None, by_scale, by_bias
        return loss * self.config.mean_factor, gradients
