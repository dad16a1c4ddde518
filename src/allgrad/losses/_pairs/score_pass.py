"""One pass over the scores of this rank's queries and all keys: the loss, or its gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from allgrad.collectives.all_reduce import all_reduce
from allgrad.losses._kind import LossKind
from allgrad.losses._pairs.column_sums import column_sums
from allgrad.losses._pairs.config import Sums
from allgrad.losses._pairs.key_blocks import MOST_PLACES
from allgrad.losses._pairs.pair_terms import softplus
from allgrad.losses._tiles.accumulators import accumulator_dtype
from allgrad.losses._tiles.torch import Gradients, row_dots, tiles_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from allgrad.losses._pairs.config import LossConfig
    from allgrad.losses._pairs.key_blocks import GatheredKeys, KeyBlock, RingKeys
    from allgrad.losses._tiles.torch import Tiles

__all__ = ["ScorePass"]


class ScorePass:
    """One pass over the scores of this rank's queries and all keys, in tiles.

    ``states`` are those of the forward pass, if this is the backward pass.
    """

    def __init__(
        self,
        config: LossConfig,
        q: Tensor,
        k: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        *,
        keys: GatheredKeys | RingKeys,
        keep: bool,
        states: Sequence[Tensor | None] = (),
    ) -> None:
        self.config, self.q, self.k, self.scale, self.bias = config, q.contiguous(), k, scale, bias
        self.dtype = accumulator_dtype(q.dtype)
        self.keys, self.keep = keys, keep
        self.states: list[Tensor | None] = list(states) or [None] * keys.count

    def loss(
        self, needed: Sequence[bool]
    ) -> tuple[Tensor, Sums | None, tuple[Tensor | None, ...] | None]:
        """The loss, what its gradients need, and the gradients where forward computes them."""
        if self.config.kind is not LossKind.SIGMOID:
            return *self._softmax_loss(), None
        pairs = self._pair_scores()
        sums = Sums(None, None, -(-pairs).sigmoid())
        loss = softplus(-pairs).sum()
        if self.keep or not self.config.needs_grad:
            for block in self.keys.blocks():
                tiles = self._tiles(block)
                loss += tiles.softplus()
                self.states[block.step] = tiles.state
            return self._mean_of_ranks(loss), sums, None
        # A small gradient could underflow in float16 before backward multiplies it by the loss scale.
        kept = self.dtype if self.q.dtype == torch.float16 else self.q.dtype
        factor = self.scale.new_full((), self.config.mean_factor)
        layout, places = self.config.layout, None
        if self.config.needs_key_grad and self.keys.count == 1 and layout.world <= MOST_PLACES:
            places = loss.new_zeros(layout.world)
            loss = places[layout.rank].add_(loss)  # and what the tiles add
        *found, total = self.gradients(
            needed, factor, sums, dtype=kept, own_terms=places, softplus_sum=loss
        )
        if total is None:
            return self._mean_of_ranks(loss), None, tuple(found)
        return total * self.config.mean_factor, None, tuple(found)

    def _softmax_loss(self) -> tuple[Tensor, Sums]:
        config, layout = self.config, self.config.layout
        negatives: Tensor | None = None
        both = config.kind is LossKind.SOFTMAX_BOTH
        column_lse = self.scale.new_empty(sum(layout.sizes)) if both else None
        key_sum = self.scale.new_zeros(self.q.shape[1]) if config.smoothing else None
        for block in self.keys.blocks():
            tiles = self._tiles(block)
            block_row_lse, block_column_lse = tiles.lse(config.kind)
            self.states[block.step] = tiles.state
            if negatives is not None:
                block_row_lse = torch.logaddexp(negatives, block_row_lse)
            negatives = block_row_lse
            if column_lse is not None and block_column_lse is not None:
                if self.keys.count == 1:
                    column_lse = block_column_lse
                else:
                    column_lse[block.columns] = block_column_lse
            if key_sum is not None:
                key_sum += block.k.sum(0, dtype=self.dtype)
        assert negatives is not None
        pairs = self._pair_scores()
        differences = negatives - pairs
        loss = softplus(differences).sum()
        pair_weights = config.smoothing - differences.sigmoid()
        if key_sum is not None:
            all_scores = self.scale * self.q.sum(0, dtype=self.dtype).dot(key_sum)
            loss += config.smoothing * (pairs.sum() - all_scores / sum(layout.sizes))
        row_lse = torch.logaddexp(negatives, pairs)
        if column_lse is None:
            return self._mean_of_ranks(loss), Sums(row_lse, None, pair_weights)
        columns = column_sums(layout, column_lse, pairs, loss)
        pair_weights -= (columns.own_negatives - pairs).sigmoid()
        return columns.loss * config.mean_factor, Sums(row_lse, columns.lse, pair_weights)

    def _mean_of_ranks(self, loss: Tensor) -> Tensor:
        loss = loss * self.config.mean_factor
        if self.config.layout.world == 1:
            return loss
        # Of all ranks' means: a rank without queries is here, and the others may be in FusedPass
        # (test_ranks_of_which_one_is_empty).
        return all_reduce(loss, group=self.config.layout.group, grad="none")

    def gradients(
        self,
        needed: Sequence[bool],
        factor: Tensor,
        sums: Sums,
        *,
        dtype: torch.dtype,
        own_terms: Tensor | None = None,
        softplus_sum: Tensor | None = None,
    ) -> tuple[Tensor | None, ...]:
        """The gradients by queries, keys, scale and bias of ``factor`` times the sum of all terms.

        ``own_terms`` are numbers of this rank; the sum of all ranks' travels with the gradients of
        the keys and is the last result.
        """
        config = self.config
        kept = dtype if self.keys.count == 1 else self.dtype
        zero = factor.new_zeros(())
        into = Gradients(
            torch.zeros_like(self.q, dtype=kept) if needed[0] else None,
            [],
            zero.clone(),
            zero.clone(),
            zero if softplus_sum is None else softplus_sum,
        )
        gain = factor * self.scale

        def add_block(block: KeyBlock, by_key: list[Tensor]) -> None:
            into.keys = by_key
            self._tiles(block).add_gradients(config.weights(sums.of(block)), gain, into)

        by_key, total = None, None
        if config.needs_key_grad:
            by_key, total = self.keys.gradients(add_block, gain, dtype, own_terms)
        else:
            for block in self.keys.blocks():
                add_block(block, [])
            if own_terms is not None:
                total = all_reduce(own_terms.sum(), group=config.layout.group, grad="none")
        by_query = None if into.queries is None else into.queries.to(dtype)
        by_bias = into.bias * factor if self.bias is not None else None
        return by_query, by_key, into.scale * factor, by_bias, total

    def _tiles(self, block: KeyBlock) -> Tiles:
        return tiles_for(
            self.q,
            block.k,
            self.scale,
            bias=self.bias,
            first_pair=block.first_pair,
            state=self.states[block.step],
            keep=self.keep,
        )

    def _pair_scores(self) -> Tensor:
        scores = row_dots(self.q, self.k).mul_(self.scale)
        return scores if self.bias is None else scores.add_(self.bias)
