"""Second derivatives: the product of the Hessian with a direction, in tiles.

The product of the first gradients with a direction is, with ``w`` the derivative of the loss by a
score, ``t`` the derivative of that score along the direction, and ``gain`` the weight of the loss,

    sum over scores of  gain w t

This is what is differentiated here. By ``t`` its derivative is ``gain w``, by a score it is

    softmax along rows       gain p (t - mean of t along the row)
    softmax along columns    p (gain t - mean of gain t along the column)
    sigmoid                  gain p (1 - p) t

with ``p`` the probability, which also weighs the means. The sums of a softmax, the means and the
gradients take one pass over the scores each. The keys are gathered, also where the first derivatives
use a ring.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from allgrad.collectives.all_gather import all_gather
from allgrad.collectives.all_reduce import all_reduce
from allgrad.losses._column_sums import column_sums, softplus
from allgrad.losses._key_blocks import reduce_sums
from allgrad.losses._kind import LossKind
from allgrad.losses._tiles import torch as torch_tiles
from allgrad.losses._tiles.accumulators import accumulator_dtype, panels
from allgrad.losses._tiles.torch import Tiles, row_dots

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from allgrad.losses._config import LossConfig
    from allgrad.losses._first_order import Inputs

__all__ = ["directional_derivative", "second_gradients"]


def directional_derivative(config: LossConfig, x: Inputs, direction: Inputs) -> Tensor:
    """The derivative of the loss along all ranks' directions, on every rank."""
    along = _Along(config, x, direction)
    return _sum_over_ranks(config, along.means(along.one).derivative) * config.mean_factor


def second_gradients(
    config: LossConfig, x: Inputs, by_loss: Tensor, direction: Inputs
) -> tuple[Tensor | None, ...]:
    """The gradients, by inputs and by ``by_loss``, of the first gradients times the direction."""
    along = _Along(config, x, direction)
    total = _sum_over_ranks(config, by_loss) if config.sums_loss_weights else by_loss
    gain = total.to(along.dtype)
    means = along.means(gain)
    numbers = means.derivative.reshape(1)
    if config.layout.world > 1:
        # One message: the means of columns, and the derivative along all ranks' directions.
        message = torch.cat([means.columns, numbers])
        message = all_reduce(message, group=config.layout.group, grad="none")
        means = means._replace(columns=message[:-1])
        numbers = message[-1:] if config.sums_loss_weights else numbers
    found = along.gradients(gain, means)
    by_key = found.keys.mul_(config.mean_factor)
    if config.layout.world > 1:
        by_key, _ = reduce_sums(config.layout, by_key, None)
    numbers = numbers * config.mean_factor
    return (
        found.queries.mul_(config.mean_factor).to(x.q.dtype),
        by_key.to(x.q.dtype),
        found.scale * config.mean_factor,
        None if x.bias is None else found.bias * config.mean_factor,
        numbers[0].to(by_loss.dtype),
    )


def _sum_over_ranks(config: LossConfig, x: Tensor) -> Tensor:
    if config.layout.world == 1:
        return x
    return all_reduce(x, group=config.layout.group, grad="none")


class _Means(NamedTuple):
    """Means along the direction, weighed by probabilities; sums over this rank's rows so far."""

    rows: Tensor
    columns: Tensor  # of gain times t
    derivative: Tensor  # the sum of w t


@dataclass(slots=True)
class _Found:
    """The accumulators of the gradients."""

    queries: Tensor
    keys: Tensor
    scale: Tensor
    bias: Tensor


class _Tile(NamedTuple):
    """The scores of some rows and some columns."""

    rows: slice
    columns: slice
    dots: Tensor
    dot_change: Tensor  # the derivative of the dot products along the direction
    t: Tensor
    by_row: Tensor  # probabilities; the sigmoid has one kind, here
    by_column: Tensor | None
    w: Tensor


class _Along:
    """The scores of this rank's queries and all keys, with their derivative along a direction."""

    def __init__(self, config: LossConfig, x: Inputs, direction: Inputs) -> None:
        self.config, self.dtype = config, accumulator_dtype(x.q.dtype)
        self.x, self.scale, self.bias = x, x.scale, x.bias
        self.one = x.scale.new_ones(())
        self.q, self.k = x.q.to(self.dtype), self._joined(x.k)
        self.dq, self.dk = direction.q.to(self.dtype), self._joined(direction.k)
        self.dscale = direction.scale.to(self.dtype)
        self.dbias = None if direction.bias is None else direction.bias.to(self.dtype)
        self.start = config.layout.start
        self.row_lse, self.column_lse = self._lse()

    def _joined(self, piece: Tensor) -> Tensor:
        layout, piece = self.config.layout, piece.to(self.dtype).contiguous()
        if layout.world == 1:
            return piece
        return all_gather(piece, sizes=layout.sizes, group=layout.group, grad="none")

    def _lse(self) -> tuple[Tensor | None, Tensor | None]:
        kind = self.config.kind
        if kind is LossKind.SIGMOID:
            return None, None
        tiles = Tiles(self.q, self.k, self.scale, first_pair=self.start)
        negatives, columns = tiles.lse(kind)
        own = slice(self.start, self.start + len(self.q))
        pairs = row_dots(self.q, self.k[own]).mul_(self.scale)
        row_lse = torch.logaddexp(negatives, pairs)
        if columns is None:
            return row_lse, None
        loss = softplus(negatives - pairs).sum()
        return row_lse, column_sums(self.config.layout, columns, pairs, loss).lse

    def _tiles(self) -> Iterator[_Tile]:
        config, is_cpu = self.config, self.q.device.type == "cpu"
        block_m, block_n = torch_tiles.CPU_TILE if is_cpu else torch_tiles.DEVICE_TILE
        each = config.smoothing / len(self.k)
        at_pairs = config.kind.directions - config.smoothing
        for rows in panels(len(self.q), block_m):
            q, dq = self.q[rows], self.dq[rows]
            for columns in panels(len(self.k), block_n):
                k, dk = self.k[columns], self.dk[columns]
                dots, dot_change = q @ k.T, dq @ k.T + q @ dk.T
                scores, t = self.scale * dots, self.dscale * dots + self.scale * dot_change
                if self.bias is not None:
                    scores += self.bias
                if self.dbias is not None:
                    t += self.dbias
                by_row, by_column = self._probabilities(scores, rows, columns)
                w = by_row - each if by_column is None else by_row + by_column - each
                w.diagonal(self.start + rows.start - columns.start).sub_(at_pairs)
                yield _Tile(rows, columns, dots, dot_change, t, by_row, by_column, w)

    def _probabilities(
        self, scores: Tensor, rows: slice, columns: slice
    ) -> tuple[Tensor, Tensor | None]:
        if self.row_lse is None:
            return scores.sigmoid(), None
        by_row = (scores - self.row_lse[rows, None]).exp_()
        if self.column_lse is None:
            return by_row, None
        return by_row, scores.sub_(self.column_lse[columns]).exp_()

    def means(self, gain: Tensor) -> _Means:
        means = _Means(
            self.one.new_zeros(len(self.q)), self.one.new_zeros(len(self.k)), self.one * 0
        )
        for tile in self._tiles():
            means.derivative.add_((tile.w * tile.t).sum())
            if self.row_lse is not None:
                means.rows[tile.rows] += (tile.by_row * tile.t).sum(1)
            if tile.by_column is not None:
                means.columns[tile.columns] += gain * (tile.by_column * tile.t).sum(0)
        return means

    def gradients(self, gain: Tensor, means: _Means) -> _Found:
        found = _Found(
            torch.zeros_like(self.q), torch.zeros_like(self.k), self.one * 0, self.one * 0
        )
        for tile in self._tiles():
            rows, columns = tile.rows, tile.columns
            if self.row_lse is None:
                by_score = gain * tile.by_row * (1 - tile.by_row) * tile.t
            else:
                by_score = gain * tile.by_row * (tile.t - means.rows[rows, None])
                if tile.by_column is not None:
                    by_score += tile.by_column * (gain * tile.t - means.columns[columns])
            weighed = gain * tile.w
            q, k, dq, dk = self.q[rows], self.k[columns], self.dq[rows], self.dk[columns]
            by_dot = self.scale * by_score + self.dscale * weighed
            by_change = self.scale * weighed
            found.queries[rows] += by_dot @ k + by_change @ dk
            found.keys[columns] += by_dot.T @ q + by_change.T @ dq
            found.scale += (by_score * tile.dots).sum() + (weighed * tile.dot_change).sum()
            found.bias += by_score.sum()
        return found
