"""A pass over scores that are all kept, on a CUDA device: the same results as ScorePass, in few launches."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from allgrad.collectives.all_reduce import all_reduce
from allgrad.losses._column_sums import column_sums
from allgrad.losses._config import Sums
from allgrad.losses._key_blocks import reduce_sums
from allgrad.losses._kind import LossKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from allgrad.losses._config import LossConfig
    from allgrad.losses._key_blocks import KeyBlock

__all__ = ["FusedPass", "has_fused_kernels"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def has_fused_kernels(q: Tensor) -> bool:
    return q.is_cuda and q.dtype in _DTYPES and _has_triton()


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
        """The loss, the dot products, and what else the gradients need."""
        config, layout, fused = self.config, self.config.layout, self.fused
        dots = fused.dot_products(self.q, self.k.T)
        if config.kind is LossKind.SIGMOID:
            parts = fused.sigmoid_term(
                dots,
                self.scale,
                self.bias,
                first_pair=self.first_pair,
                mean_factor=config.mean_factor,
            )
            return self._over_ranks(parts.sum()), dots, Sums(None, None, self.scale)
        found = fused.row_sums(
            config.kind,
            dots,
            self.scale,
            first_pair=self.first_pair,
            mean_factor=config.mean_factor,
            smoothing=config.smoothing,
        )
        if found.column_parts is None:
            loss = self._over_ranks(found.loss_parts.sum())
            return loss, dots, Sums(found.row_lse, None, found.pair_weights)
        if layout.world == 1:
            column_lse = fused.column_terms(found, config.mean_factor)
            sums = Sums(found.row_lse, column_lse, found.pair_weights)
            return found.loss_parts.sum(), dots, sums
        row_loss = found.loss_parts[: len(found.column_parts)].sum() / config.mean_factor
        columns = column_sums(layout, found.column_parts.logsumexp(0), found.pairs, row_loss)
        at_columns = (columns.own_negatives - found.pairs).sigmoid()
        sums = Sums(found.row_lse, columns.lse, found.pair_weights - at_columns)
        return columns.loss * config.mean_factor, dots, sums

    def _over_ranks(self, loss: Tensor) -> Tensor:
        layout = self.config.layout
        return loss if layout.world == 1 else all_reduce(loss, group=layout.group, grad="none")

    def gradients(
        self, needed: Sequence[bool], by_loss: Tensor, dots: Tensor, sums: Sums
    ) -> tuple[Tensor | None, ...]:
        """The gradients by queries, keys, scale and bias."""
        config, layout, q = self.config, self.config.layout, self.q
        later = config.sums_loss_weights  # the factor is known after the message
        found = self.fused.products(
            config.weights(sums),
            dots,
            q,
            self.k,
            self.scale,
            bias=self.bias,
            by_loss=None if later else by_loss,
            first_pair=self.first_pair,
            mean_factor=config.mean_factor,
            needs_query_grad=needed[0],
            needs_key_grad=config.needs_key_grad,
        )
        rows = len(q)
        if layout.world == 1:
            both = _times(found.both, found.gain, q.dtype)
            by_query = both[:rows] if needed[0] else None
            by_key = both[rows:] if config.needs_key_grad else None
            return by_query, by_key, found.by_scale, self._of_bias(found.by_bias)
        total = by_loss if later else None
        by_key = None
        if config.needs_key_grad:
            own, total = reduce_sums(layout, found.both[rows:].mul_(found.gain), total)
            by_key = own.to(q.dtype) if total is None else _times(own, total, q.dtype)
        elif total is not None:
            total = all_reduce(total, group=layout.group, grad="none")
        gain = found.gain if total is None else found.gain * total
        by_query = _times(found.both[:rows], gain, q.dtype) if needed[0] else None
        by_scale, by_bias = found.by_scale, self._of_bias(found.by_bias)
        if total is not None:
            by_scale = by_scale * total
            by_bias = None if by_bias is None else by_bias * total
        return by_query, by_key, by_scale, by_bias

    def _of_bias(self, by_bias: Tensor | None) -> Tensor | None:
        return None if self.bias is None else by_bias


def _times(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """``x * factor`` in ``dtype``, rounded once."""
    if dtype == x.dtype:
        return x.mul_(factor)
    return torch.mul(x, factor, out=torch.empty_like(x, dtype=dtype))
