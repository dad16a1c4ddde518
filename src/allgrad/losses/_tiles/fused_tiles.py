"""Tiles of a softmax's scores for float32 on a CUDA device: torch's products, fused kernels between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from allgrad.losses._kind import LossKind
from allgrad.losses._tiles import fused
from allgrad.losses._tiles.accumulators import panels
from allgrad.losses._tiles.torch import Tiles, Weights

if TYPE_CHECKING:
    from torch import Tensor

    from allgrad.losses._tiles.torch import Gradients

__all__ = ["FusedTiles"]

_NO_PAIR = -(1 << 30)


class FusedTiles(Tiles):
    """``Tiles`` in which each score is read once for the sums, and once for the weights.

    The products follow torch's switches for TF32. A sigmoid is computed in plain torch.
    """

    tile = 8192, 8192  # rows and columns

    def lse(self, kind: LossKind) -> tuple[Tensor, Tensor | None]:
        """The logsumexp of each row and, for SOFTMAX_BOTH, of each column, without pairs."""
        row_lse = self._vector(len(self.q), -torch.inf)
        both = kind is LossKind.SOFTMAX_BOTH
        column_lse = self._vector(len(self.k), -torch.inf) if both else None
        for rows in panels(len(self.q), self.tile[0]):
            for columns in panels(len(self.k), self.tile[1]):
                dots = fused.dot_products(self.q[rows], self.k[columns].T)
                found = fused.tile_lse(kind, dots, self.scale, self._first_pair(rows, columns))
                by_row, by_column = (parts.logsumexp(0) for parts in found)
                row_lse[rows] = torch.logaddexp(row_lse[rows], by_row)
                if column_lse is not None:
                    column_lse[columns] = torch.logaddexp(column_lse[columns], by_column)
        return row_lse, column_lse

    def add_gradients(self, weights: Weights, gain: Tensor, into: Gradients) -> None:
        """Add the contributions of these scores to the accumulators."""
        if weights.kind is LossKind.SIGMOID:
            super().add_gradients(weights, gain, into)
            return
        assert weights.row_lse is not None
        for rows in panels(len(self.q), self.tile[0]):
            q = self.q[rows]
            by_query = torch.zeros_like(q)
            for columns, by_key in into.column_panels(len(self.k), self.tile[1]):
                k, column_lse = self.k[columns], weights.column_lse
                by_score, numbers = fused.softmax_weights(
                    Weights(
                        weights.kind,
                        weights.row_lse[rows],
                        None if column_lse is None else column_lse[columns],
                        weights.smoothing,
                        weights.pair_weights[rows],
                    ),
                    fused.dot_products(q, k.T),
                    self.scale,
                    dtype=q.dtype,
                    by_loss=None,
                    first_pair=self._first_pair(rows, columns),
                    mean_factor=1.0,
                    in_place=True,
                )
                into.scale += numbers[0]
                by_query.addmm_(by_score, k)
                if by_key is not None:
                    by_key.addmm_(by_score.T, q)
            if into.queries is not None:
                into.queries[rows] += by_query.mul_(gain)

    def _first_pair(self, rows: slice, columns: slice) -> int:
        """The tile's column that is a pair with its row 0; far outside if the block has no pairs."""
        if self.first_pair is None:
            return _NO_PAIR
        start: int = rows.start - columns.start
        return self.first_pair + start
