"""Tiles of scores for features of up to 32 bits on a CUDA device: Triton for the scores, cuBLAS for gradients.

A pass takes one panel of queries at a time. In forward, a kernel reduces each tile to sums along
its rows and columns; a second kernel recomputes the tiles that contain pairs, without them. In
backward, a kernel stores the weights of a panel in the features' dtype, and two matrix products with float32
accumulators turn them into gradients.

One exp serves the sums along rows and along columns: exp(score - shift), with one shift for all
scores. By the Cauchy-Schwarz inequality no score is above ``|scale| max|q| max|k|``, and the shift
keeps this bound from overflow. Some sum may then be so small that terms underflowed. This is
detected afterwards, on the device: the "safe" kernels then compute the sums again with the maximum
of each row and column; otherwise they return at once.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
from torch.nn.functional import pad
from triton.tools.tensor_descriptor import TensorDescriptor

from allgrad.losses._kind import LossKind
from allgrad.losses._tiles import kernels
from allgrad.losses._tiles.accumulators import panels
from allgrad.losses._tiles.torch import Tiles

if TYPE_CHECKING:
    from torch import Tensor

    from allgrad.losses._tiles.torch import Gradients, Weights

__all__ = ["TritonTiles", "row_dots"]

_LOG2E = 1.4426950408889634
# exp(70) and a sum of 2^20 such terms are finite in float32. In a sum below exp(-60), terms may
# have underflowed.
_MAX_EXPONENT, _MIN_LOG_SUM = 70.0, -60.0

_COMBINE_BLOCK = 1024  # elements of one program of combine_logs
_SAFE_PROGRAMS = 512  # programs of the kernels that are rarely needed
# Columns of a panel of weights, by the number of elements in the keys. Matrix products of wide panels
# are faster, but beside small keys a wide panel would be most of the memory, and beside the gradients
# of large keys there is no memory left for it. 12,672 columns are three tiles of a matrix product for
# each of an H200's 132 multiprocessors.
_PANEL_COLUMNS = {2**25 - 1: 16384, 2**26: 32768}
_PANEL_COLUMNS_LARGE = 12672
# The gradients of a sigmoid in float16 are kept in float32, beside which there is room for a wide panel:
# rows and columns, beside large keys and beside keys of 2^27 elements or more.
_WIDE_PANEL, _WIDEST_PANEL = (8192, 32768), (4096, 131072)
_ROW_BLOCKS = {"BLOCK_M": 8, "BLOCK_K": 256}  # of the kernels that read whole rows


class TileConfig(NamedTuple):
    """Block sizes of a kernel's tile, and the warps and pipeline stages of a program."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    def grid(self, rows: int, columns: int) -> tuple[int]:
        return (triton.cdiv(rows, self.block_m) * triton.cdiv(columns, self.block_n),)

    def options(self) -> dict[str, int]:
        return {
            "enable_fp_fusion": True,  # as was Triton's default up to 3.9
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


class TritonTiles(Tiles):
    """``Tiles`` with Triton kernels. ``state`` holds the ``scalars`` that the kernels read."""

    panel, sums_panel = 8192, 16384
    sums_config = TileConfig(128, 128, 64, 4, 2)
    softmax_config = TileConfig(128, 128, 64, 4, 3)
    sigmoid_config = TileConfig(128, 128, 64, 8, 3)
    float32_configs = TileConfig(128, 128, 32, 4, 2), TileConfig(128, 128, 32, 4, 3)

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
        self.aligned_q, self.aligned_k = _operands(q, k)
        if q.dtype == torch.float32:
            self.sums_config, self.softmax_config = self.float32_configs
            self.sigmoid_config = self.softmax_config
        self.scalars = self._write_scalars() if state is None else state
        self.state = self.scalars
        # Weights are at most 2. Stored times 2^14, small ones keep their digits in float16.
        self.store_scale = 2.0**14 if q.dtype == torch.float16 else 1.0

    def _write_scalars(self) -> Tensor:
        """Scale, shift and bias to base 2, and the flag of a failed shift, unset."""
        norms_q, norms_k = _max_norms(self.q), _max_norms(self.k)
        scalars = self.scale.new_empty(4)
        kernels.write_scalars[(1,)](
            norms_q,
            norms_k,
            len(norms_q),
            len(norms_k),
            self.scale,
            self.scale if self.bias is None else self.bias,
            scalars,
            _MAX_EXPONENT,
            HAS_BIAS=self.bias is not None,
            BLOCK=_COMBINE_BLOCK,
        )
        return scalars

    def lse(self, kind: LossKind) -> tuple[Tensor, Tensor | None]:
        """The logsumexp of each row and, for SOFTMAX_BOTH, of each column, without pairs."""
        both = kind is LossKind.SOFTMAX_BOTH
        row_sums, column_sums = self._vector(len(self.q), 0.0), self._vector(len(self.k), 0.0)
        if not len(self.q) or not len(self.k):
            return row_sums.log(), column_sums.log() if both else None
        for rows in panels(len(self.q), self.sums_panel):
            row_parts, column_parts = self._launch_sums(kernels.sums_tile, rows, both)
            torch.sum(row_parts, 0, out=row_sums[rows])
            if both:
                column_sums += column_parts.sum(0)
        lowest = torch.minimum(row_sums.min(), column_sums.min()) if both else row_sums.min()
        failed = ~(lowest >= math.exp(_MIN_LOG_SUM))
        self.scalars[3] = failed
        row_logs, column_logs = self._safe_logs(both)
        shift = self.scalars[1]
        row_lse = torch.where(failed, row_logs, row_sums.log2_() + shift) / _LOG2E
        if not both:
            return row_lse, None
        return row_lse, torch.where(failed, column_logs, column_sums.log2_() + shift) / _LOG2E

    def _safe_logs(self, both: bool) -> tuple[Tensor, Tensor]:
        """The logsumexp to base 2 if the shift failed; otherwise undefined, and not computed."""
        low = -torch.inf
        row_logs, column_logs = self._vector(len(self.q), low), self._vector(len(self.k), low)
        for rows in panels(len(self.q), self.sums_panel):
            kernel = kernels.safe_sums_tile
            row_parts, column_parts = self._launch_sums(
                kernel, rows, both, max_programs=_SAFE_PROGRAMS
            )
            for parts, logs in ((row_parts, row_logs[rows]), (column_parts, column_logs)):
                grid = (triton.cdiv(len(logs), _COMBINE_BLOCK),)
                kernels.combine_logs[grid](
                    parts, logs, self.scalars, parts.shape[0], len(logs), BLOCK=_COMBINE_BLOCK
                )
        return row_logs, column_logs

    def _launch_sums(
        self, kernel: Any, rows: slice, both: bool, *, max_programs: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Reduce the tiles of a panel: for each row one part per tile, and for each column."""
        config, q, k = self.sums_config, self.aligned_q[rows], self.aligned_k
        row_parts = self.scale.new_empty(triton.cdiv(len(k), config.block_n), len(q))
        column_parts = row_parts.new_empty(
            triton.cdiv(len(q), config.block_m) if both else 0, len(k)
        )
        args = (
            TensorDescriptor.from_tensor(q, [config.block_m, config.block_k]),
            TensorDescriptor.from_tensor(k, [config.block_n, config.block_k]),
            self.scalars,
            row_parts,
            column_parts,
            len(q),
            len(k),
            q.shape[1],
            self._first_pair(rows, slice(0, len(k))),
        )
        (tiles,) = config.grid(len(q), len(k))
        programs = tiles if max_programs is None else min(tiles, max_programs)
        kernel[(programs,)](*args, HAS_COLUMNS=both, **config.options())
        if kernel is kernels.sums_tile and self.first_pair is not None:
            pair_tiles = triton.cdiv(config.block_m, config.block_n) + 1
            kernels.sums_pair_tile[(triton.cdiv(len(q), config.block_m) * pair_tiles,)](
                *args, HAS_COLUMNS=both, PAIR_TILES=pair_tiles, **config.options()
            )
        return row_parts, column_parts

    def softplus(self) -> Tensor:
        """The sum of log(1 + exp(score)) without pairs."""
        total = self._vector(1, 0.0)[0]
        for rows in panels(len(self.q), self.panel):
            for columns in panels(len(self.k), self.panel):
                total += self._launch_sigmoid(rows, columns, None, None)[0]
        return total

    def add_gradients(self, weights: Weights, gain: Tensor, into: Gradients) -> None:
        """Add the contributions of these scores to the accumulators."""
        max_rows, max_columns = self._panel_size(weights.kind)
        memory = self.q.new_empty(max_rows, min(max_columns, _multiple_of_8(len(self.k))))
        sums = self.scale.new_empty(max_rows, self.q.shape[1])
        logs = [None if x is None else x * _LOG2E for x in (weights.row_lse, weights.column_lse)]
        for rows in panels(len(self.q), max_rows):
            q = self.q[rows]
            by_query = sums[: len(q)].zero_()
            for columns, by_key in into.column_panels(len(self.k), max_columns):
                k = self.k[columns]
                by_score = memory[: len(q), : len(k)]
                if weights.kind is LossKind.SIGMOID:
                    softplus, total = self._launch_sigmoid(
                        rows, columns, weights.pair_weights, by_score
                    )
                    into.softplus += softplus
                    into.bias += total
                else:
                    self._launch_softmax(weights, logs, rows, columns, by_score)
                _add_product(by_query, by_score, k, self.store_scale)
                if by_key is not None:
                    _add_product(by_key, by_score.T, q, self.store_scale)
            if into.queries is None:
                into.scale += row_dots(by_query, q).sum()
            else:
                into.scale += _add_rows(by_query, q, gain, into.queries[rows]).sum()

    def _panel_size(self, kind: LossKind) -> tuple[int, int]:
        """Rows and columns of the largest panel of weights."""
        size, rows = self.k.numel(), self.panel
        columns = next((n for most, n in _PANEL_COLUMNS.items() if size <= most), None)
        if columns is None and kind is LossKind.SIGMOID and self.q.dtype == torch.float16:
            rows, columns = _WIDE_PANEL if size < 2**27 else _WIDEST_PANEL
        return max(1, min(rows, len(self.q))), columns or _PANEL_COLUMNS_LARGE

    def _launch_softmax(
        self,
        weights: Weights,
        logs: list[Tensor | None],
        rows: slice,
        columns: slice,
        by_score: Tensor,
    ) -> None:
        """Store the weights of a panel; ``logs`` are ``row_lse`` and ``column_lse`` to base 2."""
        row_logs, column_logs = logs
        assert row_logs is not None
        config, q, k = self.softmax_config, self.aligned_q[rows], self.aligned_k[columns]
        args = (
            TensorDescriptor.from_tensor(q, [config.block_m, config.block_k]),
            TensorDescriptor.from_tensor(k, [config.block_n, config.block_k]),
            self.scalars,
            row_logs[rows],
            row_logs if column_logs is None else column_logs[columns],
            TensorDescriptor.from_tensor(by_score, [config.block_m, config.block_n]),
            len(q),
            len(k),
            q.shape[1],
            weights.smoothing,
        )
        options = {
            "HAS_SMOOTHING": weights.smoothing != 0,
            "STORE_SCALE": self.store_scale,
            **config.options(),
        }
        both, (tiles,) = weights.kind is LossKind.SOFTMAX_BOTH, config.grid(len(q), len(k))
        kernels.softmax_tile[(tiles,)](*args, HAS_COLUMNS=both, **options)
        if both:
            kernels.safe_softmax_tile[(min(tiles, _SAFE_PROGRAMS),)](*args, **options)
        first = self._first_pair(rows, columns)
        if -len(q) < first < len(k):
            pairs, start = by_score.diagonal(first), rows.start + max(0, -first)
            pairs.copy_(weights.pair_weights[start : start + len(pairs)] * self.store_scale)

    def _launch_sigmoid(
        self, rows: slice, columns: slice, pair_weights: Tensor | None, by_score: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The sum of log(1 + exp(score)) without pairs; with ``by_score``, store the weights and sum them."""
        config, q, k = self.sigmoid_config, self.aligned_q[rows], self.aligned_k[columns]
        grid = config.grid(len(q), len(k))
        sums = self.scale.new_zeros(2, *grid)
        kernels.sigmoid_tile[grid](
            TensorDescriptor.from_tensor(q, [config.block_m, config.block_k]),
            TensorDescriptor.from_tensor(k, [config.block_n, config.block_k]),
            self.scalars,
            sums if pair_weights is None else pair_weights[rows],
            sums[0],
            sums[1],
            sums
            if by_score is None
            else TensorDescriptor.from_tensor(by_score, [config.block_m, config.block_n]),
            len(q),
            len(k),
            q.shape[1],
            self._first_pair(rows, columns),
            STORE_WEIGHTS=by_score is not None,
            STORE_SCALE=self.store_scale,
            **config.options(),
        )
        softplus, total = sums.sum(1).unbind()
        return softplus / _LOG2E, total

    def _first_pair(self, rows: slice, columns: slice) -> int:
        """The panel's column that is a pair with its row 0; far outside if the block has no pairs."""
        return (
            -(1 << 30) if self.first_pair is None else self.first_pair + rows.start - columns.start
        )


def row_dots(a: Tensor, b: Tensor) -> Tensor:
    """The dot product of each row of ``a`` with the same row of ``b``, in float32."""
    a, b = _contiguous_rows(a), _contiguous_rows(b)
    dots = a.new_empty(len(a), dtype=torch.float32)
    if len(a):
        args = a, b, dots, *a.shape, a.stride(0), b.stride(0)
        kernels.row_dots[_row_grid(a)](*args, **_ROW_BLOCKS)
    return dots


def _add_rows(a: Tensor, b: Tensor, gain: Tensor, into: Tensor) -> Tensor:
    """``row_dots`` of a and b; add ``a * gain`` to ``into`` in the same pass over the memory."""
    b = _contiguous_rows(b)
    dots = a.new_empty(len(a))
    args = a, b, gain, into, dots, *a.shape, a.stride(0), b.stride(0), into.stride(0)
    kernels.add_rows[_row_grid(a)](*args, **_ROW_BLOCKS)
    return dots


def _max_norms(x: Tensor) -> Tensor:
    """The largest norm in each block of rows."""
    x = _contiguous_rows(x)
    norms = x.new_empty(*_row_grid(x), dtype=torch.float32)
    if len(x):
        kernels.max_norms[_row_grid(x)](x, norms, *x.shape, x.stride(0), **_ROW_BLOCKS)
    return norms


def _contiguous_rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _row_grid(x: Tensor) -> tuple[int]:
    return (triton.cdiv(len(x), _ROW_BLOCKS["BLOCK_M"]),)


def _multiple_of_8(count: int) -> int:
    """Round up to a multiple of 8: a tensor descriptor needs rows aligned to 16 bytes."""
    return -(-count // 8) * 8


def _operands(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """What the kernels multiply, row by row, for the dot products of queries and keys.

    Tensor cores multiply float32 numbers of 11 bits (TF32). Where torch's switches do not allow that,
    a number is the sum of two of them, and three products of these are one in float32 but for the
    last bits: low * high + high * low + high * high, the small ones first.
    """
    if q.dtype != torch.float32:
        return _aligned(q), _aligned(k)
    q_high, k_high = _round_to_tf32(q), _round_to_tf32(k)
    if torch.backends.cuda.matmul.fp32_precision == "tf32":
        return _aligned(q_high), _aligned(k_high)
    return (
        _aligned(torch.cat([q - q_high, q_high, q_high], 1)),
        _aligned(torch.cat([k_high, k - k_high, k_high], 1)),
    )


def _round_to_tf32(x: Tensor) -> Tensor:
    """Round to the nearest number of 11 bits; a tensor core would cut off the others."""
    shifted = x * (2.0**13 + 1)
    return shifted - (shifted - x)


def _aligned(x: Tensor) -> Tensor:
    x = x.contiguous()
    return (
        x
        if x.shape[1] % 8 == 0 and x.data_ptr() % 16 == 0
        else pad(x, (0, -x.shape[1] % 8)).clone()
    )


def _add_product(into: Tensor, a: Tensor, b: Tensor, store_scale: float) -> None:
    if a.dtype == torch.float32:
        into.addmm_(a, b)  # with TF32 as torch's switches say
    else:
        torch.addmm(into, a, b, out_dtype=torch.float32, alpha=1 / store_scale, out=into)
