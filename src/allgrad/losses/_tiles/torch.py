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
from allgrad.losses._tiles.accumulators import accumulator_dtype, add_product, panels
from allgrad.losses._tiles.cpu_bfloat16 import (
    multiplies_bfloat16,
    multiplies_twice,
    product_of_two,
)
from allgrad.losses._tiles.exponentials import exp_, logsumexp

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

__all__ = ["Gradients", "Tiles", "Weights", "has_triton", "row_dots", "scores_of", "tiles_for"]

CPU_TILE = 512, 1024  # rows and columns of a tile that stays in the caches of a CPU
DEVICE_TILE = 4096, 4096
# Up to so many scores of a rank are kept from forward to backward, instead of computed twice.
KEPT_SCORES = {"cpu": 2**24, "cuda": 2**28}
TRITON_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})


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
            for columns in panels(len(self.k), self.block_n):
                scores = self._negatives(rows, columns)
                if self.keep:
                    return logsumexp(scores, 1), logsumexp(scores, 0) if both else None
                row_lse[rows] = torch.logaddexp(row_lse[rows], logsumexp(scores, 1))
                if column_lse is not None:
                    part = torch.logaddexp(column_lse[columns], logsumexp(scores, 0))
                    column_lse[columns] = part
        return row_lse, column_lse

    def softplus(self) -> Tensor:
        """The sum of log(1 + exp(score)) without pairs."""
        total = self._vector(1, 0.0)[0]
        for rows in panels(len(self.q), self.block_m):
            for columns in panels(len(self.k), self.block_n):
                total -= logsigmoid(-self._negatives(rows, columns)).sum()
        return total

    def add_gradients(self, weights: Weights, gain: Tensor, into: Gradients) -> None:
        """Add the contributions of these scores to the accumulators."""
        # The other kinds come here around a ring only, where messages take longer than products.
        narrow = weights.kind is LossKind.SOFTMAX_BOTH and multiplies_bfloat16(self.q, len(self.k))
        for rows in panels(len(self.q), self.block_m):
            own = self.q[rows].to(self.dtype)
            by_query, q = torch.zeros_like(own), self.q[rows] if narrow else own
            for columns, by_key in into.column_panels(len(self.k), self.block_n):
                kept = None if self.state is None else self.state[rows, columns]
                scores = self._scores(rows, columns) if kept is None else kept
                by_score = self._weights(weights, scores, rows, columns, into)
                if narrow:
                    self._move_pairs(by_score, rows, columns, by_query, by_key)
                    by_score = by_score.to(q.dtype)
                add_product(by_query, by_score, self.k[columns].to(q.dtype))
                if by_key is not None:
                    add_product(by_key, by_score.T, q)
            into.scale += torch.dot(by_query.flatten(), own.flatten())
            if into.queries is not None:
                into.queries[rows] += by_query.mul_(gain)

    def _move_pairs(
        self, tile: Tensor, rows: slice, columns: slice, by_query: Tensor, by_key: Tensor | None
    ) -> None:
        """Add what the pairs contribute, and set their weights to 0.

        A pair's weight and the others' nearly cancel: rounded to 16 bits, they would not.
        """
        pairs = self._pairs_of(tile, rows, columns)
        if not len(pairs):
            return
        assert self.first_pair is not None
        offset = self.first_pair + rows.start - columns.start
        first_row, first_column = max(0, -offset), max(0, offset)
        q = slice(first_row, first_row + len(pairs))
        k = slice(first_column, first_column + len(pairs))
        by_pair = pairs.clone().unsqueeze(1)
        by_query[q].addcmul_(by_pair, self.k[columns][k].to(self.dtype))
        if by_key is not None:
            by_key[k].addcmul_(by_pair, self.q[rows][q].to(self.dtype))
        pairs.zero_()

    def _scores(self, rows: slice, columns: slice) -> Tensor:
        return scores_of(self.q[rows], self.k[columns], self.scale, self.bias)

    def _negatives(self, rows: slice, columns: slice) -> Tensor:
        """The scores of a tile, -inf at pairs."""
        scores = self._scores(rows, columns)
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
                tile = exp_(torch.sub(scores, weights.row_lse[rows, None], out=spare))
            else:
                assert weights.column_lse is not None
                tile = exp_(scores - weights.row_lse[rows, None])
                tile += exp_(torch.sub(scores, weights.column_lse[columns], out=spare))
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


def scores_of(
    q: Tensor, k: Tensor, scale: Tensor, bias: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """``scale * q @ k.T + bias`` in the accumulators' dtype, in the memory of ``out``.

    Rounded to 16 bits, scores would cost digits of the gradients.
    """
    dtype = accumulator_dtype(q.dtype)
    if out is None:
        out = q.new_empty(len(q), len(k), dtype=dtype)
    if q.dtype == k.dtype and multiplies_twice(q, len(k)):
        product_of_two(q, k, out=out).mul_(scale)
    else:
        torch.mm(q.to(dtype) * scale, k.to(dtype).T, out=out)
    return out if bias is None else out.add_(bias)


def row_dots(a: Tensor, b: Tensor) -> Tensor:
    """The dot product of each row of ``a`` with the same row of ``b``, in the accumulator's dtype."""
    if has_kernels(a) and a.itemsize == 2:
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
    if has_kernels(q) and not keep:
        from allgrad.losses._tiles.triton import TritonTiles

        return TritonTiles(q, k, scale, bias=bias, first_pair=first_pair, state=state)
    return Tiles(q, k, scale, bias=bias, first_pair=first_pair, state=state, keep=keep)


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def has_kernels(x: Tensor) -> bool:
    """Whether there are Triton kernels for it."""
    return x.is_cuda and x.dtype in TRITON_DTYPES and has_triton()
