"""Scores in tiles, in plain torch: sums over rows and columns, and gradients; any device and dtype.

The scores of n queries and m keys are never all there. A tile of them is computed, reduced to what
is needed of it, and dropped. Sums are kept in float32, of float64 in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import logsigmoid

from allgrad.losses._tiles.accumulators import accumulator, panels

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

__all__ = ["Gradients", "Tiles", "Weights", "row_dots", "tiles_for"]

TILE = 512, 1024  # what stays in the caches of a CPU


@dataclass(frozen=True, slots=True)
class Weights:
    """What a score weighs in the gradient, before all weights are multiplied by one number.

        softmax    exp(score - rows_i)  +  exp(score - columns_j)    of those that are given
        sigmoid    1 / (1 + exp(-score))                             if neither is

    less ``everywhere``; and ``pairs`` where row and column are a pair, one for each row: there a
    weight is a difference of almost equal numbers, which the scores alone would not give.
    """

    rows: Tensor | None
    columns: Tensor | None
    everywhere: float
    pairs: Tensor

    @property
    def sigmoid(self) -> bool:
        return self.rows is None and self.columns is None


@dataclass(slots=True)
class Gradients:
    """What a pass over the scores adds up; the weights count without the number before them.

    ``queries`` is None and ``keys`` is empty where nobody wants them; ``keys`` may come in parts,
    one below the other. ``scale`` is the sum of weight times ``q @ k``. ``bias``, the sum of the
    weights, and ``softplus``, that of log(1 + exp(score)) but for pairs, are for the sigmoid only.
    """

    queries: Tensor | None
    keys: list[Tensor]
    scale: Tensor
    bias: Tensor
    softplus: Tensor

    def columns(self, length: int, most: int) -> Iterator[tuple[slice, Tensor | None]]:
        """Cut the columns so that each panel lies in one part of ``keys``; give it with its part."""
        if not self.keys:
            yield from ((across, None) for across in panels(length, most))
        start = 0
        for part in self.keys:
            for inside in panels(len(part), most):
                yield slice(start + inside.start, start + inside.stop), part[inside]
            start += len(part)


class Tiles:
    """The scores ``scale * q @ k.T + bias`` of one rank's queries and a block of keys.

    Query i and key ``first_pair + i`` are a pair; ``None`` if the block has no key of a pair.
    ``state`` is what a kind of tiles finds out in ``lse`` and wants back for the gradients.
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
    ) -> None:
        self.q, self.k, self.scale, self.bias = q, k, scale, bias
        self.first_pair = first_pair
        self.state: Tensor | None = state
        self.dtype = accumulator(q.dtype)
        self.tall, self.wide = TILE if q.device.type == "cpu" else (4096, 4096)

    def lse(self, *, columns: bool) -> tuple[Tensor, Tensor | None]:
        """The log of the sum of exp(score) but for pairs, along each row and, if asked for, column."""
        row_lse = self._vector(len(self.q), -torch.inf)
        column_lse = self._vector(len(self.k), -torch.inf) if columns else None
        for rows in panels(len(self.q), self.tall):
            q = self.q[rows].to(self.dtype) * self.scale
            for across in panels(len(self.k), self.wide):
                scores = self._scores(q, self.k[across].to(self.dtype))
                self._diagonal(scores, rows, across).fill_(-torch.inf)
                row_lse[rows] = torch.logaddexp(row_lse[rows], scores.logsumexp(1))
                if column_lse is not None:
                    part = torch.logaddexp(column_lse[across], scores.logsumexp(0))
                    column_lse[across] = part
        return row_lse, column_lse

    def softplus(self) -> Tensor:
        """The sum of log(1 + exp(score)) but for pairs."""
        total = self._vector(1, 0.0)[0]
        for rows in panels(len(self.q), self.tall):
            q = self.q[rows].to(self.dtype) * self.scale
            for across in panels(len(self.k), self.wide):
                scores = self._scores(q, self.k[across].to(self.dtype))
                self._diagonal(scores, rows, across).fill_(-torch.inf)
                total -= logsigmoid(scores.neg_()).sum()
        return total

    def add_gradients(self, weights: Weights, gain: Tensor, into: Gradients) -> None:
        """Add what these scores give to the gradients, to ``into.queries`` times ``gain``."""
        for rows in panels(len(self.q), self.tall):
            q = self.q[rows].to(self.dtype)
            scaled, by_query = q * self.scale, torch.zeros_like(q)
            for across, by_key in into.columns(len(self.k), self.wide):
                k = self.k[across].to(self.dtype)
                weighed = self._weighed(weights, self._scores(scaled, k), rows, across, into)
                by_query.addmm_(weighed, k)
                if by_key is not None:
                    by_key.addmm_(weighed.T, q)
            into.scale += torch.dot(by_query.flatten(), q.flatten())
            if into.queries is not None:
                into.queries[rows] += by_query.mul_(gain)

    def _scores(self, scaled: Tensor, k: Tensor) -> Tensor:
        return scaled @ k.T if self.bias is None else torch.addmm(self.bias, scaled, k.T)

    def _diagonal(self, scores: Tensor, rows: slice, across: slice) -> Tensor:
        """Those of a tile that belong to pairs."""
        if self.first_pair is None:
            return scores[:0, :0].diagonal()
        return scores.diagonal(self.first_pair + rows.start - across.start)

    def _weighed(
        self, weights: Weights, scores: Tensor, rows: slice, across: slice, into: Gradients
    ) -> Tensor:
        if weights.sigmoid:
            self._diagonal(scores, rows, across).fill_(-torch.inf)
            into.softplus -= logsigmoid(-scores).sum()
            weighed = scores.sigmoid_()
        elif weights.rows is None or weights.columns is None:
            assert weights.rows is not None
            weighed = scores.sub_(weights.rows[rows, None]).exp_()
        else:
            weighed = (scores - weights.rows[rows, None]).exp_()
            weighed += scores.sub_(weights.columns[across]).exp_()
        if weights.everywhere:
            weighed -= weights.everywhere
        pairs = self._diagonal(weighed, rows, across)
        if len(pairs):
            assert self.first_pair is not None
            first = max(rows.start, across.start - self.first_pair)
            pairs.copy_(weights.pairs[first : first + len(pairs)])
        if weights.sigmoid:
            into.bias += weighed.sum()
        return weighed

    def _vector(self, length: int, value: float) -> Tensor:
        return self.q.new_full((length,), value, dtype=self.dtype)


def row_dots(a: Tensor, b: Tensor) -> Tensor:
    """The product of each row of ``a`` with that of ``b``, summed as sums are."""
    if _has_kernels(a):
        from allgrad.losses._tiles import triton as cuda_tiles

        return cuda_tiles.row_dots(a, b)
    dtype = accumulator(a.dtype)
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
) -> Tiles:
    """Tiles for these features: kernels of their own for 16 bits on a CUDA device."""
    if _has_kernels(q):
        from allgrad.losses._tiles.triton import CudaTiles

        return CudaTiles(q, k, scale, bias=bias, first_pair=first_pair, state=state)
    return Tiles(q, k, scale, bias=bias, first_pair=first_pair, state=state)


def _has_kernels(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in {torch.bfloat16, torch.float16}
