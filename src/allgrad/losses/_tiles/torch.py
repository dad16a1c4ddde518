"""Tiles of scores in plain torch, for any device and dtype: sums along rows and columns, and gradients.

The n x m scores of n queries and m keys never exist at once. Each tile is computed, reduced, and
dropped. Sums are kept in float32, or in float64 for float64 features.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import logsigmoid

from allgrad.losses._kind import LossKind
from allgrad.losses._tiles.accumulators import accumulator_dtype, panels

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

__all__ = ["Gradients", "Tiles", "Weights", "has_triton", "row_dots", "tiles_for"]

CPU_TILE = 512, 1024  # rows and columns of a tile that stays in the caches of a CPU
DEVICE_TILE = 4096, 4096
# Up to so many scores of a rank are kept from forward to backward, instead of computed twice.
KEPT_SCORES = {"cpu": 2**24, "cuda": 2**28}


@dataclass(frozen=True, slots=True)
class Weights:
    """The derivative of the loss by each score, before the common factor ``gain``.

        softmax    exp(score - row_lse[i])  +  exp(score - column_lse[j])
        sigmoid    1 / (1 + exp(-score))

    minus ``smoothing``. SOFTMAX_ROWS has the first term only. Where row i and column j are a pair,
    the weight is ``pair_weights[i]`` instead: a difference of almost equal numbers that the score
    alone would not give exactly.
    """

    kind: LossKind
    row_lse: Tensor | None
    column_lse: Tensor | None
    smoothing: float
    pair_weights: Tensor


@dataclass(slots=True)
class Gradients:
    """Accumulators of one pass, before the common factor ``gain`` (``queries`` includes it).

    ``queries`` is None and ``keys`` is empty if no gradient is needed. ``keys`` may be split along
    dim 0 into parts. ``scale`` is the sum of weight times ``q @ k``. Only the sigmoid uses ``bias``,
    the sum of the weights, and ``softplus``, the sum of log(1 + exp(score)) without pairs.
    """

    queries: Tensor | None
    keys: list[Tensor]
    scale: Tensor
    bias: Tensor
    softplus: Tensor

    def column_panels(self, length: int, max_size: int) -> Iterator[tuple[slice, Tensor | None]]:
        """Split the columns so that each panel lies in one part of ``keys``; give both."""
        if not self.keys:
            yield from ((columns, None) for columns in panels(length, max_size))
        start = 0
        for part in self.keys:
            for inside in panels(len(part), max_size):
                yield slice(start + inside.start, start + inside.stop), part[inside]
            start += len(part)


class Tiles:
    """The scores ``scale * q @ k.T + bias`` of one rank's queries and one block of keys.

    Query i and key ``first_pair + i`` are a pair; None if the block contains no key of a pair.
    ``state`` is what forward computed for the gradients of the same block, if anything. With
    ``keep`` there is a single tile, and its scores, -inf at pairs, are the state.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        scale: Tensor,
        *,
        bias: Tensor | None = None,
        first_pair: int | None = None,
        state: Tensor | None = None,
        keep: bool = False,
    ) -> None:
        self.q, self.k, self.scale, self.bias = q, k, scale, bias
        self.first_pair = first_pair
        self.state: Tensor | None = state
        self.keep = keep
        self.dtype = accumulator_dtype(q.dtype)
        tile = CPU_TILE if q.device.type == "cpu" else DEVICE_TILE
        self.block_m, self.block_n = (max(1, len(q)), max(1, len(k))) if keep else tile

    def lse(self, kind: LossKind) -> tuple[Tensor, Tensor | None]:
        """The logsumexp of each row and, for SOFTMAX_BOTH, of each column, without pairs."""
        row_lse = self._vector(len(self.q), -torch.inf)
        both = kind is LossKind.SOFTMAX_BOTH
        column_lse = self._vector(len(self.k), -torch.inf) if both else None
        for rows in panels(len(self.q), self.block_m):
            q = self.q[rows].to(self.dtype) * self.scale
            for columns in panels(len(self.k), self.block_n):
                scores = self._negatives(q, rows, columns)
                if self.keep:
                    return scores.logsumexp(1), scores.logsumexp(0) if both else None
                row_lse[rows] = torch.logaddexp(row_lse[rows], scores.logsumexp(1))
                if column_lse is not None:
                    part = torch.logaddexp(column_lse[columns], scores.logsumexp(0))
                    column_lse[columns] = part
        return row_lse, column_lse

    def softplus(self) -> Tensor:
        """The sum of log(1 + exp(score)) without pairs."""
        total = self._vector(1, 0.0)[0]
        for rows in panels(len(self.q), self.block_m):
            q = self.q[rows].to(self.dtype) * self.scale
            for columns in panels(len(self.k), self.block_n):
                total -= logsigmoid(-self._negatives(q, rows, columns)).sum()
        return total

    def add_gradients(self, weights: Weights, gain: Tensor, into: Gradients) -> None:
        """Add the contributions of these scores to the accumulators."""
        for rows in panels(len(self.q), self.block_m):
            q = self.q[rows].to(self.dtype)
            scaled, by_query = q * self.scale, torch.zeros_like(q)
            for columns, by_key in into.column_panels(len(self.k), self.block_n):
                k = self.k[columns].to(self.dtype)
                kept = None if self.state is None else self.state[rows, columns]
                scores = self._scores(scaled, k) if kept is None else kept
                by_score = self._weights(weights, scores, rows, columns, into)
                by_query.addmm_(by_score, k)
                if by_key is not None:
                    by_key.addmm_(by_score.T, q)
            into.scale += torch.dot(by_query.flatten(), q.flatten())
            if into.queries is not None:
                into.queries[rows] += by_query.mul_(gain)

    def _scores(self, scaled: Tensor, k: Tensor) -> Tensor:
        return scaled @ k.T if self.bias is None else torch.addmm(self.bias, scaled, k.T)

    def _negatives(self, scaled: Tensor, rows: slice, columns: slice) -> Tensor:
        """The scores of a tile, -inf at pairs."""
        scores = self._scores(scaled, self.k[columns].to(self.dtype))
        self._pairs_of(scores, rows, columns).fill_(-torch.inf)
        if self.keep:
            self.state = scores
        return scores

    def _pairs_of(self, tile: Tensor, rows: slice, columns: slice) -> Tensor:
        """The elements of a tile that belong to pairs, as a view."""
        if self.first_pair is None:
            return tile[:0, :0].diagonal()
        return tile.diagonal(self.first_pair + rows.start - columns.start)

    def _weights(
        self, weights: Weights, scores: Tensor, rows: slice, columns: slice, into: Gradients
    ) -> Tensor:
        """The weights of a tile, in the memory of its scores unless these are kept."""
        spare = None if self.state is not None else scores
        is_sigmoid = weights.kind is LossKind.SIGMOID
        if is_sigmoid:
            if self.state is None:
                self._pairs_of(scores, rows, columns).fill_(-torch.inf)
                into.softplus -= logsigmoid(-scores).sum()
            tile = torch.sigmoid(scores, out=spare)
        else:
            assert weights.row_lse is not None
            if weights.kind is LossKind.SOFTMAX_ROWS:
                tile = torch.sub(scores, weights.row_lse[rows, None], out=spare).exp_()
            else:
                assert weights.column_lse is not None
                tile = (scores - weights.row_lse[rows, None]).exp_()
                tile += torch.sub(scores, weights.column_lse[columns], out=spare).exp_()
        if weights.smoothing:
            tile -= weights.smoothing
        pairs = self._pairs_of(tile, rows, columns)
        if len(pairs):
            assert self.first_pair is not None
            first = max(rows.start, columns.start - self.first_pair)
            pairs.copy_(weights.pair_weights[first : first + len(pairs)])
        if is_sigmoid:
            into.bias += tile.sum()
        return tile

    def _vector(self, length: int, value: float) -> Tensor:
        return self.q.new_full((length,), value, dtype=self.dtype)


def row_dots(a: Tensor, b: Tensor) -> Tensor:
    """The dot product of each row of ``a`` with the same row of ``b``, in the accumulator's dtype."""
    if _has_kernels(a):
        from allgrad.losses._tiles.triton import row_dots as triton_row_dots

        return triton_row_dots(a, b)
    dtype = accumulator_dtype(a.dtype)
    dots = a.new_empty(len(a), dtype=dtype)
    for rows in panels(len(a), 8192):
        torch.sum(a[rows].to(dtype) * b[rows].to(dtype), 1, out=dots[rows])
    return dots


def tiles_for(
    q: Tensor,
    k: Tensor,
    scale: Tensor,
    *,
    bias: Tensor | None,
    first_pair: int | None,
    state: Tensor | None,
    keep: bool = False,
) -> Tiles:
    """Tiles for these features: on a CUDA device Triton kernels up to 32 bits, otherwise plain torch."""
    is_float32 = q.is_cuda and q.dtype == torch.float32 and has_triton()
    if (_has_kernels(q) or is_float32) and not keep:
        from allgrad.losses._tiles.triton import TritonTiles

        return TritonTiles(q, k, scale, bias=bias, first_pair=first_pair, state=state)
    return Tiles(q, k, scale, bias=bias, first_pair=first_pair, state=state, keep=keep)


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def _has_kernels(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in {torch.bfloat16, torch.float16}
