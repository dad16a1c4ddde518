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

__all__ = ["CudaTiles", "row_dots"]

_LOG2E = 1.4426950408889634
# exp of these and of sums of 2^20 such terms are floats; below the floor terms may have been lost.
_HIGHEST, _FLOOR = 70.0, -60.0


_SMALL = 1024  # columns of one program that joins logs
_FEW = 512  # programs of a kernel that seldom has anything to do
# Products of wide panels are faster; beside the gradients of more keys the memory would be missed.
_SMALL_KEYS = 2**26
_DOTS = 8, 256  # rows of one program that multiplies rows, and how much of them at once


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
    sums_shape = softmax_shape = Shape(128, 128, 64, 4, 2)
    sigmoid_shape = Shape(128, 128, 64, 4, 3)

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
        wide = panel if self.k.numel() > _SMALL_KEYS else 2 * panel
        memory = self.q.new_empty(min(panel, len(self.q)), min(wide, _up(len(self.k))))
        logs = [None if x is None else x * _LOG2E for x in (weights.rows, weights.columns)]
        for rows in panels(len(self.q), panel):
            q = self.q[rows]
            by_query = self.scale.new_zeros(len(q), width)
            for across, by_key in into.columns(len(self.k), wide):
                k = self.k[across]
                weighed = memory[: len(q), : len(k)]
                if weights.sigmoid:
                    softplus, total = self._launch_sigmoid(rows, across, weights.pairs, weighed)
                    into.softplus += softplus
                    into.bias += total
                else:
                    self._launch_softmax(weights, logs, rows, across, weighed)
                _add_product(by_query, weighed, k, self.lift)
                if by_key is not None:
                    _add_product(by_key, weighed.T, q, self.lift)
            into.scale += row_dots(by_query, q).sum()
            if into.queries is not None:
                into.queries[rows] += by_query.mul_(gain)

    def _launch_softmax(
        self, w: Weights, logs: list[Tensor | None], rows: slice, across: slice, weighed: Tensor
    ) -> None:
        by_row, by_column = logs
        assert by_row is not None
        shape, q, k = self.softmax_shape, self.aligned_q[rows], self.aligned_k[across]
        given = (
            TensorDescriptor.from_tensor(q, [shape.tall, shape.deep]),
            TensorDescriptor.from_tensor(k, [shape.wide, shape.deep]),
            self.facts,
            by_row[rows],
            by_row if by_column is None else by_column[across],
            TensorDescriptor.from_tensor(weighed, [shape.tall, shape.wide]),
            len(q),
            len(k),
            q.shape[1],
            w.everywhere,
        )
        options = {"SMOOTHED": w.everywhere != 0, "LIFT": self.lift, **shape.options()}
        columns, (tiles,) = by_column is not None, shape.grid(len(q), len(k))
        score_kernels.softmax_tile[(tiles,)](*given, COLUMNS=columns, **options)
        if columns:
            score_kernels.softmax_tile_of_any_range[(min(tiles, _FEW),)](*given, **options)
        first = self._first_pair(rows, across)
        if -len(q) < first < len(k):
            pairs, start = weighed.diagonal(first), rows.start + max(0, -first)
            pairs.copy_(w.pairs[start : start + len(pairs)] * self.lift)

    def _launch_sigmoid(
        self, rows: slice, across: slice, pairs: Tensor | None, weighed: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The sum of log(1 + exp(score)) but for pairs and, if asked for, of the weights it writes."""
        shape, q, k = self.sigmoid_shape, self.aligned_q[rows], self.aligned_k[across]
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


def row_dots(a: Tensor, b: Tensor) -> Tensor:
    """The product of each row of ``a`` with that of ``b``, in float32."""
    a, b = (x if x.stride(1) == 1 else x.contiguous() for x in (a, b))
    dots = a.new_empty(len(a), dtype=torch.float32)
    if len(a):
        grid = (triton.cdiv(len(a), _DOTS[0]),)
        given = a, b, dots, len(a), a.shape[1], a.stride(0), b.stride(0)
        score_kernels.row_dots[grid](*given, TALL=_DOTS[0], DEEP=_DOTS[1])
    return dots


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
