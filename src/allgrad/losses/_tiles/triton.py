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

from allgrad.losses._tiles import kernels as score_kernels
from allgrad.losses._tiles.accumulators import panels
from allgrad.losses._tiles.torch import Tiles

if TYPE_CHECKING:
    from torch import Tensor

    from allgrad.losses._tiles.torch import Gradients, Weights

__all__ = ["CudaTiles", "row_dots"]

_LOG2E = 1.4426950408889634
# exp of these and of sums of 2^20 such terms are floats; below the floor terms may have been lost.
_HIGHEST, _FLOOR = 70.0, -60.0


_SMALL = 1024  # columns of one program that joins logs
_FEW = 512  # programs of a kernel that seldom has anything to do
# Products of wide panels are faster. Beside small keys they would take most of the memory, and beside
# the gradients of large ones it would be missed; 12,672 are three tiles of a product for each of an
# H200's 132 processors.
_WIDTHS = {2**25 - 1: 16384, 2**26: 32768}  # up to so many elements of keys
_NARROW = 12672
_ROWS = {"TALL": 8, "DEEP": 256}  # of a program that goes along rows, and how much of them at once


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

    panel, sums_panel = 8192, 16384
    sums_shape = Shape(128, 128, 64, 4, 2)
    softmax_shape = sigmoid_shape = Shape(128, 128, 64, 4, 3)

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
        longest_q, longest_k = _longest(self.q), _longest(self.k)
        facts = self.scale.new_empty(4)
        score_kernels.find_facts[(1,)](
            longest_q,
            longest_k,
            len(longest_q),
            len(longest_k),
            self.scale,
            self.scale if self.bias is None else self.bias,
            facts,
            _HIGHEST,
            BIASED=self.bias is not None,
            SMALL=_SMALL,
        )
        return facts

    def lse(self, *, columns: bool) -> tuple[Tensor, Tensor | None]:
        """The log of the sum of exp(score) but for pairs, along each row and, if asked for, column."""
        row_sums, column_sums = self._vector(len(self.q), 0.0), self._vector(len(self.k), 0.0)
        if not len(self.q) or not len(self.k):
            return row_sums.log(), column_sums.log() if columns else None
        for rows in panels(len(self.q), self.sums_panel):
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
        for rows in panels(len(self.q), self.sums_panel):
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
        tall = min(self.panel, len(self.q))
        wide = next((w for most, w in _WIDTHS.items() if self.k.numel() <= most), _NARROW)
        memory = self.q.new_empty(tall, min(wide, _up(len(self.k))))
        sums = self.scale.new_empty(tall, self.q.shape[1])
        logs = [None if x is None else x * _LOG2E for x in (weights.rows, weights.columns)]
        for rows in panels(len(self.q), self.panel):
            q = self.q[rows]
            by_query = sums[: len(q)].zero_()
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
            if into.queries is None:
                into.scale += row_dots(by_query, q).sum()
            else:
                into.scale += _add_rows(by_query, q, gain, into.queries[rows]).sum()

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
    a, b = _dense_rows(a), _dense_rows(b)
    dots = a.new_empty(len(a), dtype=torch.float32)
    if len(a):
        given = a, b, dots, *a.shape, a.stride(0), b.stride(0)
        score_kernels.row_dots[_row_grid(a)](*given, **_ROWS)
    return dots


def _add_rows(a: Tensor, b: Tensor, gain: Tensor, into: Tensor) -> Tensor:
    """The same, and ``a`` times ``gain`` is added to ``into``, all in one pass over the memory."""
    b = _dense_rows(b)
    dots = a.new_empty(len(a))
    given = a, b, gain, into, dots, *a.shape, a.stride(0), b.stride(0), into.stride(0)
    score_kernels.add_rows[_row_grid(a)](*given, **_ROWS)
    return dots


def _longest(x: Tensor) -> Tensor:
    """The largest norms of some rows each."""
    x = _dense_rows(x)
    longest = x.new_empty(*_row_grid(x), dtype=torch.float32)
    if len(x):
        score_kernels.find_longest[_row_grid(x)](x, longest, *x.shape, x.stride(0), **_ROWS)
    return longest


def _dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _row_grid(x: Tensor) -> tuple[int]:
    return (triton.cdiv(len(x), _ROWS["TALL"]),)


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
