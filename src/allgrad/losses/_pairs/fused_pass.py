"""A pass over scores that are all kept, on a CUDA device: the same results as ScorePass, in few launches."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

from allgrad.collectives.all_reduce import all_reduce
from allgrad.losses._kind import LossKind
from allgrad.losses._pairs.column_sums import column_sums
from allgrad.losses._pairs.config import Sums
from allgrad.losses._pairs.key_blocks import reduce_sums
from allgrad.losses._tiles.accumulators import times
from allgrad.losses._tiles.torch import KEPT_SCORES, has_kernels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from allgrad.losses._pairs.config import LossConfig
    from allgrad.losses._pairs.key_blocks import KeyBlock

__all__ = ["FusedPass", "kept_scores"]

_LARGE_DEVICE = 64 << 30  # bytes


@cache
def _is_large(device: torch.device) -> bool:
    return torch.cuda.get_device_properties(device).total_memory > _LARGE_DEVICE


def kept_scores(q: Tensor, *, alone: bool) -> int:
    """Up to how many scores of a rank are kept; the same on all ranks of several.

    One rank alone on a large device keeps more: at 32,768 pairs, tiles take the host longer than the
    device. The scores then take 4 GiB, and their weights in 16 bits 2 GiB.
    """
    limit = KEPT_SCORES.get(q.device.type, 0)
    if alone and has_kernels(q) and _is_large(q.device):
        return 4 * limit
    return limit


class FusedPass:
    """The scores of this rank's queries, at least one, and all keys, gathered in ``block``."""

    def __init__(
        self,
        config: LossConfig,
        q: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        block: KeyBlock,
    ) -> None:
        from allgrad.losses._tiles import fused

        self.fused, self.config = fused, config
        self.q, self.k, self.scale, self.bias = q.contiguous(), block.k, scale, bias
        assert block.first_pair is not None
        self.first_pair = block.first_pair

    def loss(self) -> tuple[Tensor, Tensor, Sums]:
        """The loss, a matrix that the gradients need, and what else they need.

        The matrix has the dot products, or for SIGMOID the derivatives by the scores.
        """
        config, layout, fused = self.config, self.config.layout, self.fused
        dots, mean_factor = fused.score_products(self.q, self.k), config.mean_factor
        if config.kind is LossKind.SIGMOID:
            by_score, numbers = fused.sigmoid_terms(
                dots,
                self.scale,
                self.bias,
                dtype=self.q.dtype,
                needs_grad=config.needs_grad,
                first_pair=self.first_pair,
                mean_factor=mean_factor,
            )
            return self._over_ranks(numbers[0]), by_score, Sums(None, None, numbers[1:])
        found = fused.softmax_terms(
            config.kind,
            self.q,
            self.k,
            dots,
            self.scale,
            alone=layout.world == 1,
            first_pair=self.first_pair,
            mean_factor=mean_factor,
            smoothing=config.smoothing,
        )
        loss = found.loss
        if config.smoothing:
            all_scores = self.scale * self._sum(self.q).dot(self._sum(self.k)) / len(self.k)
            loss = loss + config.smoothing * mean_factor * (found.pairs.sum() - all_scores)
        if found.column_parts is None:
            sums = Sums(found.row_lse, found.column_lse, found.pair_weights)
            return self._over_ranks(loss), dots, sums
        negatives = found.column_parts.logsumexp(0)
        columns = column_sums(layout, negatives, found.pairs, loss / mean_factor)
        at_columns = (columns.own_negatives - found.pairs).sigmoid()
        sums = Sums(found.row_lse, columns.lse, found.pair_weights - at_columns)
        return columns.loss * mean_factor, dots, sums

    def _sum(self, x: Tensor) -> Tensor:
        return x.sum(0, dtype=torch.float32)

    def _over_ranks(self, loss: Tensor) -> Tensor:
        layout = self.config.layout
        if layout.world == 1:
            return loss.clone()  # it may be a view, which the caller could not change in place
        return all_reduce(loss, group=layout.group, grad="none")

    def products(
        self, needed: Sequence[bool], by_loss: Tensor | None, kept: Tensor, sums: Sums
    ) -> tuple[Tensor, Tensor]:
        """Products and numbers.

        The products are the gradients by queries and by keys, before the factor ``numbers[-1]``. The
        numbers before it are the gradients by the scale and, for SIGMOID, the bias. ``kept`` is the matrix
        of forward.
        """
        config = self.config
        if config.kind is LossKind.SIGMOID:
            by_score = kept
            numbers = sums.pair_weights if by_loss is None else sums.pair_weights * by_loss
        else:
            by_score, numbers = self.fused.softmax_weights(
                config.weights(sums),
                kept,
                self.scale,
                dtype=self.q.dtype,
                by_loss=by_loss,
                first_pair=self.first_pair,
                mean_factor=config.mean_factor,
            )
        both = self.fused.products(
            by_score,
            self.q,
            self.k,
            needs_query_grad=needed[0],
            needs_key_grad=config.needs_key_grad,
        )
        return both, numbers

    def gradients_of_ranks(
        self, needed: Sequence[bool], by_loss: Tensor, kept: Tensor, sums: Sums
    ) -> tuple[Tensor | None, ...]:
        """The gradients by queries, keys, scale and bias, of several ranks."""
        config, layout, dtype = self.config, self.config.layout, self.q.dtype
        later = config.sums_loss_weights  # the factor is known after the message
        both, numbers = self.products(needed, None if later else by_loss, kept, sums)
        total, by_key, rows = by_loss if later else None, None, len(self.q)
        if config.needs_key_grad:
            own, total = reduce_sums(layout, both[rows:].mul_(numbers[-1]), total)
            by_key = own.to(dtype) if total is None else times(own, total, dtype)
        elif total is not None:
            total = all_reduce(total, group=layout.group, grad="none")
        if total is not None:
            numbers = numbers * total
        by_query = times(both[:rows], numbers[-1], dtype) if needed[0] else None
        return by_query, by_key, numbers[0], None if self.bias is None else numbers[1]
