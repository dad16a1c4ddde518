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

Forward mode asks for the change of the first gradients instead, which are ``gain w`` times what a score
is made of. It is the same, but along columns, where a gain is that of a row:

    softmax along columns    gain p (t - mean of t along the column)

and with a change of the gain times ``w`` added to each.

Digits: scores are rounded, so that the probabilities of a row do not add up to 1, and where one of
them is close to 1, ``t`` is close to its mean. So means are divided by the sum of the probabilities,
``t`` is taken relative to that of the pair, and the ``w`` of a pair is made of the other scores
(test_second_derivatives_keep_their_digits).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from allgrad.collectives.all_gather import all_gather
from allgrad.collectives.all_reduce import all_reduce
from allgrad.losses._kind import LossKind
from allgrad.losses._pairs.column_sums import column_sums
from allgrad.losses._pairs.key_blocks import reduce_sums
from allgrad.losses._pairs.pair_terms import softplus
from allgrad.losses._tiles import torch as torch_tiles
from allgrad.losses._tiles.accumulators import accumulator_dtype, panels
from allgrad.losses._tiles.exponentials import exp_
from allgrad.losses._tiles.torch import Tiles, row_dots

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from allgrad.losses._pairs.config import LossConfig
    from allgrad.losses._pairs.first_order import Inputs

__all__ = ["directional_derivative", "gradient_change", "second_gradients"]


def directional_derivative(config: LossConfig, x: Inputs, direction: Inputs) -> Tensor:
    """The derivative of the loss along all ranks' directions, on every rank."""
    along = _Along(config, x, direction, x.scale.new_ones(()))
    return _sum_over_ranks(config, along.means().derivative) * config.mean_factor


def second_gradients(
    config: LossConfig, x: Inputs, by_loss: Tensor, direction: Inputs
) -> tuple[Tensor | None, ...]:
    """The gradients, by inputs and by ``by_loss``, of the first gradients times the direction."""
    total = _sum_over_ranks(config, by_loss) if config.sums_loss_weights else by_loss
    *found, derivative = _gradients_along(config, x, _Along(config, x, direction, total))
    assert derivative is not None
    return *found, derivative.to(by_loss.dtype)


def gradient_change(
    config: LossConfig, x: Inputs, by_loss: Tensor, direction: Inputs, by_loss_change: Tensor
) -> tuple[Tensor | None, ...]:
    """What the first gradients change by along all ranks' directions, that of ``by_loss`` included."""
    gains = torch.stack([by_loss, by_loss_change])
    gain, change = _sum_over_ranks(config, gains) if config.sums_loss_weights else gains
    *found, _ = _gradients_along(config, x, _Along(config, x, direction, gain, change))
    return tuple(found)


def _gradients_along(config: LossConfig, x: Inputs, along: _Along) -> tuple[Tensor | None, ...]:
    """The gradients by all inputs, and the derivative of the loss along the direction."""
    means = along.means()
    derivative = means.derivative.reshape(1)
    if config.layout.world > 1:
        # One message: the sums of columns, and the derivative along all ranks' directions.
        message = torch.cat([means.columns.flatten(), derivative])
        message = all_reduce(message, group=config.layout.group, grad="none")
        means = means._replace(columns=message[:-1].view(2, -1))
        derivative = message[-1:] if config.sums_loss_weights else derivative
    found = along.gradients(means)
    by_key = found.keys.mul_(config.mean_factor)
    if config.layout.world > 1:
        by_key, _ = reduce_sums(config.layout, by_key, None)
    return (
        found.queries.mul_(config.mean_factor).to(x.q.dtype),
        by_key.to(x.q.dtype),
        found.scale * config.mean_factor,
        None if x.bias is None else found.bias * config.mean_factor,
        (derivative * config.mean_factor)[0],
    )


def _sum_over_ranks(config: LossConfig, x: Tensor) -> Tensor:
    if config.layout.world == 1:
        return x
    return all_reduce(x, group=config.layout.group, grad="none")


class _Means(NamedTuple):
    """Sums along the direction, weighed by probabilities, and below them the sums of these.

    Those of columns are over this rank's rows so far.
    """

    rows: Tensor
    columns: Tensor  # of gain times t, or of t in forward mode
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
    by_row: Tensor  # probabilities; of the sigmoid p (1 - p)
    by_column: Tensor | None
    w: Tensor

    def pairs(self, x: Tensor, start: int) -> Tensor:
        """The entries of pairs in a matrix of this tile; ``start`` is the column of the first row."""
        return x.diagonal(start + self.rows.start - self.columns.start)


class _Along:
    """The scores of this rank's queries and all keys, with their derivative along a direction.

    ``gain`` weighs the loss; ranks may have different ones. In forward mode it has a change too.
    """

    def __init__(
        self,
        config: LossConfig,
        x: Inputs,
        direction: Inputs,
        gain: Tensor,
        gain_change: Tensor | None = None,
    ) -> None:
        self.config, self.dtype = config, accumulator_dtype(x.q.dtype)
        self.x, self.scale, self.bias = x, x.scale, x.bias
        self.one, self.gain = x.scale.new_ones(()), gain.to(self.dtype)
        self.gain_change = None if gain_change is None else gain_change.to(self.dtype)
        # Along columns the means are of the gain times t, or the gain multiplies what comes of them.
        gains = (self.gain, self.one) if gain_change is None else (self.one, self.gain)
        self.gain_of_means, self.gain_of_columns = gains
        self.q, self.k = x.q.to(self.dtype), self._joined(x.k)
        self.start, self.dq = config.layout.start, direction.q.to(self.dtype)
        self.dscale = direction.scale.to(self.dtype)
        self.dbias = None if direction.bias is None else direction.bias.to(self.dtype)
        own = self.k[self.start : self.start + len(self.q)]
        dk, dots = direction.k.to(self.dtype), row_dots(self.q, own)
        change = row_dots(self.dq, own) + row_dots(self.q, dk[: len(self.q)])
        self.of_rows = self.dscale * dots + self.scale * change  # t of the pairs; no bias shifts it
        self.of_columns = self.of_rows[:0]  # of the pairs, what the means of columns are of
        if config.kind is LossKind.SOFTMAX_BOTH:
            joined = self._joined(torch.cat([dk, (self.gain_of_means * self.of_rows)[:, None]], 1))
            self.dk, self.of_columns = joined[:, :-1], joined[:, -1]
        else:
            self.dk = self._joined(dk)
        self.row_lse, self.column_lse, self.pair_weights = self._lse(dots.mul_(self.scale))

    def _joined(self, piece: Tensor) -> Tensor:
        layout, piece = self.config.layout, piece.to(self.dtype).contiguous()
        if layout.world == 1:
            return piece
        return all_gather(piece, sizes=layout.sizes, group=layout.group, grad="none")

    def _lse(self, pairs: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """Of rows and of columns; and the derivative of the loss by the score of each pair."""
        kind = self.config.kind
        if kind is LossKind.SIGMOID:
            return None, None, -(-(pairs if self.bias is None else pairs + self.bias)).sigmoid()
        tiles = Tiles(self.q, self.k, self.scale, first_pair=self.start)
        negatives, columns = tiles.lse(kind)
        row_lse, by_rows = torch.logaddexp(negatives, pairs), -(negatives - pairs).sigmoid()
        if columns is None:
            return row_lse, None, by_rows
        found = column_sums(self.config.layout, columns, pairs, softplus(negatives - pairs).sum())
        return row_lse, found.lse, by_rows - (found.own_negatives - pairs).sigmoid()

    def _tiles(self) -> Iterator[_Tile]:
        config, is_cpu = self.config, self.q.device.type == "cpu"
        block_m, block_n = torch_tiles.CPU_TILE if is_cpu else torch_tiles.DEVICE_TILE
        each = config.smoothing / len(self.k)
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
                if self.row_lse is None:  # p (1 - p)
                    by_row = by_row * (-scores).sigmoid_()
                tile = _Tile(rows, columns, dots, dot_change, t, by_row, by_column, w)
                at_pairs, first = tile.pairs(w, self.start), columns.start - self.start
                own = max(rows.start, first)
                at_pairs.copy_(self.pair_weights[own : own + len(at_pairs)]).add_(
                    config.smoothing - each
                )
                yield tile

    def _probabilities(
        self, scores: Tensor, rows: slice, columns: slice
    ) -> tuple[Tensor, Tensor | None]:
        if self.row_lse is None:
            return scores.sigmoid(), None
        by_row = exp_(scores - self.row_lse[rows, None])
        if self.column_lse is None:
            return by_row, None
        return by_row, exp_(scores.sub_(self.column_lse[columns]))

    def means(self) -> _Means:
        columns = len(self.k) if self.column_lse is not None else 0
        means = _Means(
            self.one.new_zeros(2, len(self.q)), self.one.new_zeros(2, columns), self.one * 0
        )
        for tile in self._tiles():
            means.derivative.add_((tile.w * tile.t).sum())
            if self.row_lse is not None:
                along = self._less(tile, tile.t, self.of_rows[tile.rows, None])
                means.rows[0, tile.rows] += (tile.by_row * along).sum(1)
                means.rows[1, tile.rows] += tile.by_row.sum(1)
            if tile.by_column is not None:
                along = self._less(tile, self.gain_of_means * tile.t, self.of_columns[tile.columns])
                means.columns[0, tile.columns] += (tile.by_column * along).sum(0)
                means.columns[1, tile.columns] += tile.by_column.sum(0)
        return means

    def _less(self, tile: _Tile, along: Tensor, of_pairs: Tensor) -> Tensor:
        """What the scores change by along the direction, less that of the pairs in their rows or columns."""
        found = along - of_pairs
        tile.pairs(found, self.start).zero_()
        return found

    def gradients(self, means: _Means) -> _Found:
        found = _Found(
            torch.zeros_like(self.q), torch.zeros_like(self.k), self.one * 0, self.one * 0
        )
        gain = self.gain
        of_rows, of_columns = (x[0] / x[1] for x in (means.rows, means.columns))
        for tile in self._tiles():
            rows, columns = tile.rows, tile.columns
            if self.row_lse is None:
                by_score = gain * tile.by_row * tile.t
            else:
                along = self._less(tile, tile.t, self.of_rows[rows, None])
                by_score = gain * tile.by_row * (along - of_rows[rows, None])
                if tile.by_column is not None:
                    along = self._less(tile, self.gain_of_means * tile.t, self.of_columns[columns])
                    along -= of_columns[columns]
                    by_score += self.gain_of_columns * tile.by_column * along
            if self.gain_change is not None:
                by_score += self.gain_change * tile.w
            weighed = gain * tile.w
            q, k, dq, dk = self.q[rows], self.k[columns], self.dq[rows], self.dk[columns]
            by_dot = self.scale * by_score + self.dscale * weighed
            by_change = self.scale * weighed
            found.queries[rows] += by_dot @ k + by_change @ dk
            found.keys[columns] += by_dot.T @ q + by_change.T @ dq
            found.scale += (by_score * tile.dots).sum() + (weighed * tile.dot_change).sum()
            found.bias += by_score.sum()
        return found
