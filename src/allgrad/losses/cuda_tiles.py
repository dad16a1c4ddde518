"""Scores of 16-bit features on a CUDA device: Triton for the tiles, cuBLAS for the gradients.

A pass takes a panel of queries at a time. Forward, a kernel reduces each tile to sums along its
rows and columns, and another does so again, without the pairs, where a tile has some. Backward, a
kernel writes the weights of a panel of scores in 16 bits, and two matrix products with float32 sums
make the gradients of it.

One exp serves the sums along rows and along columns: exp(score - shift), the shift the same for
all scores. By Cauchy and Schwarz no score is above ``|scale| max|q| max|k|``, and the shift keeps
that far from overflow. Whether some sum is so small that terms of it may have been lost is found
out afterwards, on the device: then kernels for any range do it again, and otherwise return at once.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
from torch.nn.functional import pad
from triton.tools.tensor_descriptor import (  # type: ignore[import-not-found,unused-ignore]
    TensorDescriptor,
)

from allgrad.losses import score_kernels
from allgrad.losses.narrowing import panels
from allgrad.losses.tiles import Tiles

if TYPE_CHECKING:
    from torch import Tensor

    from allgrad.losses.tiles import Gradients, Weights

__all__ = ["CudaTiles"]

_LOG2E = 1.4426950408889634
# exp of these and of sums of 2^20 such terms are floats; below the floor terms may have been lost.
_HIGHEST, _FLOOR = 70.0, -60.0


_SMALL = 1024  # columns of one program that joins logs
_FEW = 512  # programs of a kernel that seldom has anything to do


class Shape(NamedTuple):
    """How a kernel cuts: rows, columns and depth of a tile, and what a program of it runs on."""

    tall: int
    wide: int
    deep: int
    warps: int
    stages: int

    def grid(self, rows: int, columns: int) -> tuple[int]:
        return (triton.cdiv(rows, self.tall) * triton.cdiv(columns, self.wide),)

    def options(self) -> dict[str, int]:
        return {
            "TALL": self.tall,
            "WIDE": self.wide,
            "DEEP": self.deep,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


class CudaTiles(Tiles):
    """The same as ``Tiles``. ``state`` are the facts that kernels read."""

    panel = 8192
    sums_shape = Shape(128, 128, 64, 4, 2)
    weights_shape = Shape(128, 128, 64, 4, 3)

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
        super().__init__(q, k, scale, bias=bias, first_pair=first_pair)
        self.aligned_q, self.aligned_k = _aligned(q), _aligned(k)
        self.facts = self._facts() if state is None else state
        self.state = self.facts
        # Weights are at most 2; lifted, the small ones of float16 keep their bits.
        self.lift = 2.0**14 if q.dtype == torch.float16 else 1.0

    def _facts(self) -> Tensor:
        """Numbers for the kernels: scale, shift and bias to base 2, and no failure yet."""
        highest = self.scale.abs() * _longest(self.q) * _longest(self.k)
        shift = (highest - _HIGHEST).clamp_(min=0)
        bias = torch.zeros_like(shift) if self.bias is None else self.bias
        return torch.stack([self.scale, shift, bias, torch.zeros_like(shift)]) * _LOG2E

    def lse(self, *, columns: bool) -> tuple[Tensor, Tensor | None]:
        """The log of the sum of exp(score) but for pairs, along each row and, if asked for, column."""
        row_sums, column_sums = self._vector(len(self.q), 0.0), self._vector(len(self.k), 0.0)
        if not len(self.q) or not len(self.k):
            return row_sums.log(), column_sums.log() if columns else None
        for rows in panels(len(self.q), self.panel):
            by_row, by_column = self._launch_sums(score_kernels.sums_tile, rows, columns)
            torch.sum(by_row, 0, out=row_sums[rows])
            if columns:
                column_sums += by_column.sum(0)
        lowest = torch.minimum(row_sums.min(), column_sums.min()) if columns else row_sums.min()
        failed = ~(lowest >= math.exp(_FLOOR))
        self.facts[3] = failed
        row_logs, column_logs = self._logs_of_any_range(columns)
        shift = self.facts[1]
        row_lse = torch.where(failed, row_logs, row_sums.log2_() + shift) / _LOG2E
        if not columns:
            return row_lse, None
        return row_lse, torch.where(failed, column_logs, column_sums.log2_() + shift) / _LOG2E

    def _logs_of_any_range(self, columns: bool) -> tuple[Tensor, Tensor]:
        """The same to base 2, if the sums failed; otherwise nobody computes or reads anything."""
        low = -torch.inf
        row_logs, column_logs = self._vector(len(self.q), low), self._vector(len(self.k), low)
        for rows in panels(len(self.q), self.panel):
            kernel = score_kernels.sums_tile_of_any_range
            by_row, by_column = self._launch_sums(kernel, rows, columns, most=_FEW)
            for parts, logs in ((by_row, row_logs[rows]), (by_column, column_logs)):
                grid = (triton.cdiv(len(logs), _SMALL),)
                score_kernels.join_logs[grid](
                    parts, logs, self.facts, parts.shape[0], len(logs), SMALL=_SMALL
                )
        return row_logs, column_logs

    def _launch_sums(
        self, kernel: Any, rows: slice, columns: bool, *, most: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Reduce the tiles of a panel, in at most so many programs: a part for each tile in line."""
        shape, q, k = self.sums_shape, self.aligned_q[rows], self.aligned_k
        by_row = self.scale.new_empty(triton.cdiv(len(k), shape.wide), len(q))
        by_column = by_row.new_empty(triton.cdiv(len(q), shape.tall) if columns else 0, len(k))
        given = (
            TensorDescriptor.from_tensor(q, [shape.tall, shape.deep]),
            TensorDescriptor.from_tensor(k, [shape.wide, shape.deep]),
            self.facts,
            by_row,
            by_column,
            len(q),
            len(k),
            q.shape[1],
            self._first_pair(rows, slice(0, len(k))),
        )
        (tiles,) = shape.grid(len(q), len(k))
        programs = tiles if most is None else min(tiles, most)
        kernel[(programs,)](*given, COLUMNS=columns, **shape.options())
        if kernel is score_kernels.sums_tile and self.first_pair is not None:
            crossed = triton.cdiv(shape.tall, shape.wide) + 1
            score_kernels.sums_tile_of_pairs[(triton.cdiv(len(q), shape.tall) * crossed,)](
                *given, COLUMNS=columns, CROSSED=crossed, **shape.options()
            )
        return by_row, by_column

    def softplus(self) -> Tensor:
        """The sum of log(1 + exp(score)) but for pairs."""
        total = self._vector(1, 0.0)[0]
        for rows in panels(len(self.q), self.panel):
            for across in panels(len(self.k), self.panel):
                total += self._launch_sigmoid(rows, across, None, None)[0]
        return total

    def add_gradients(self, weights: Weights, gain: Tensor, into: Gradients) -> None:
        """Add what these scores give to the gradients, to ``into.queries`` times ``gain``."""
        panel, width = self.panel, self.q.shape[1]
        memory = self.q.new_empty(min(panel, len(self.q)), min(panel, _up(len(self.k))))
        for rows in panels(len(self.q), panel):
            q = self.q[rows]
            by_query = self.scale.new_zeros(len(q), width)
            for across, by_key in into.columns(len(self.k), panel):
                k = self.k[across]
                weighed = memory[: len(q), : len(k)]
                if weights.sigmoid:
                    softplus, total = self._launch_sigmoid(rows, across, weights.pairs, weighed)
                    into.softplus += softplus
                    into.bias += total
                else:
                    self._launch_softmax(weights, rows, across, weighed)
                _add_product(by_query, weighed, k, self.lift)
                if by_key is not None:
                    _add_product(by_key, weighed.T, q, self.lift)
            into.scale += (by_query * q).sum()
            if into.queries is not None:
                into.queries[rows] += by_query.mul_(gain)

    def _launch_softmax(self, w: Weights, rows: slice, across: slice, weighed: Tensor) -> None:
        assert w.rows is not None
        shape, q, k = self.weights_shape, self.aligned_q[rows], self.aligned_k[across]
        by_row = w.rows[rows] * _LOG2E
        score_kernels.softmax_tile[shape.grid(len(q), len(k))](
            TensorDescriptor.from_tensor(q, [shape.tall, shape.deep]),
            TensorDescriptor.from_tensor(k, [shape.wide, shape.deep]),
            self.facts,
            by_row,
            by_row if w.columns is None else w.columns[across] * _LOG2E,
            w.pairs[rows],
            TensorDescriptor.from_tensor(weighed, [shape.tall, shape.wide]),
            len(q),
            len(k),
            q.shape[1],
            self._first_pair(rows, across),
            w.everywhere,
            COLUMNS=w.columns is not None,
            SMOOTHED=w.everywhere != 0,
            LIFT=self.lift,
            **shape.options(),
        )

    def _launch_sigmoid(
        self, rows: slice, across: slice, pairs: Tensor | None, weighed: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The sum of log(1 + exp(score)) but for pairs and, if asked for, of the weights it writes."""
        shape, q, k = self.weights_shape, self.aligned_q[rows], self.aligned_k[across]
        grid = shape.grid(len(q), len(k))
        sums = self.scale.new_zeros(2, *grid)
        score_kernels.sigmoid_tile[grid](
            TensorDescriptor.from_tensor(q, [shape.tall, shape.deep]),
            TensorDescriptor.from_tensor(k, [shape.wide, shape.deep]),
            self.facts,
            sums if pairs is None else pairs[rows],
            sums[0],
            sums[1],
            sums
            if weighed is None
            else TensorDescriptor.from_tensor(weighed, [shape.tall, shape.wide]),
            len(q),
            len(k),
            q.shape[1],
            self._first_pair(rows, across),
            STORE=weighed is not None,
            LIFT=self.lift,
            **shape.options(),
        )
        softplus, total = sums.sum(1).unbind()
        return softplus / _LOG2E, total

    def _first_pair(self, rows: slice, across: slice) -> int:
        """Where the panel's row 0 has its pair among the panel's columns; far off if nowhere."""
        return (
            -(1 << 30) if self.first_pair is None else self.first_pair + rows.start - across.start
        )


def _longest(x: Tensor) -> Tensor:
    """The largest norm of a row, in panels: float32 of all rows would be large."""
    if not len(x):
        return x.new_zeros((), dtype=torch.float32)
    norms = [
        torch.linalg.vector_norm(x[p], dim=1, dtype=torch.float32).amax()
        for p in panels(len(x), 65536)
    ]
    return torch.stack(norms).amax()


def _up(count: int) -> int:
    """The next multiple of 8: the copy engine wants rows that start at 16 bytes."""
    return -(-count // 8) * 8


def _aligned(x: Tensor) -> Tensor:
    x = x.contiguous()
    return (
        x
        if x.shape[1] % 8 == 0 and x.data_ptr() % 16 == 0
        else pad(x, (0, -x.shape[1] % 8)).clone()
    )


def _add_product(into: Tensor, a: Tensor, b: Tensor, lift: float) -> None:
    torch.addmm(into, a, b, out_dtype=torch.float32, alpha=1 / lift, out=into)
