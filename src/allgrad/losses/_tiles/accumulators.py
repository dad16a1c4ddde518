"""Float32 accumulators that become a 16-bit tensor in their own memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

__all__ = [
    "accumulator_dtype",
    "accumulator_zeros",
    "add_product",
    "panels",
    "scale_and_cast",
    "times",
]


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of ``dtype`` are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def panels(length: int, max_size: int) -> Iterator[slice]:
    """Split a length into slices of at most ``max_size``."""
    return (slice(start, min(start + max_size, length)) for start in range(0, length, max_size))


def accumulator_zeros(like: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Zeros in the shape of ``like`` and the accumulator's dtype, for a result in ``dtype``.

    They are split along dim 0 into two parts if ``dtype`` has half the bytes, as ``scale_and_cast`` needs.
    """
    rows, *others = like.shape
    wide = accumulator_dtype(like.dtype)
    first = (rows + 1) // 2 if wide.itemsize == 2 * dtype.itemsize else rows
    parts = [first, rows - first] if first < rows else [rows]
    return [like.new_zeros((part, *others), dtype=wide) for part in parts]


def add_product(into: Tensor, a: Tensor, b: Tensor) -> None:
    """Add ``a @ b`` to an accumulator; a product of narrower numbers is rounded to their dtype first."""
    if a.dtype == into.dtype:
        into.addmm_(a, b)
    else:
        into.add_(torch.mm(a, b))


def scale_and_cast(parts: list[Tensor], gain: Tensor, dtype: torch.dtype) -> Tensor:
    """Give the parts, times ``gain``, as one tensor of ``dtype``. The parts are overwritten.

    Two parts with elements of twice the bytes end in the memory of the first; nothing is allocated:

        [ a a a a | b b b b ]         [ a a | b b | c c | d d ]
        [ c c c c | d d d d ]   --->
    """
    first = parts[0]
    if len(parts) == 1:
        return first.mul_(gain).to(dtype)
    rows = len(first) + len(parts[1])
    result = first.view(-1).view(dtype)[: rows * first.stride(0)].view(rows, *first.shape[1:])
    # Row i of the result overwrites row i // 2 of the first part, so that row must have been read.
    # Writing rows start to 2 * start overwrites only rows before start.
    result[:1] = first[:1] * gain
    start = 1
    while start < len(first):
        stop = min(2 * start, len(first))
        torch.mul(first[start:stop], gain, out=result[start:stop])
        start = stop
    torch.mul(parts[1], gain, out=result[len(first) :])
    return result


def times(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """``x * factor`` in ``dtype``, rounded once, without a copy in between."""
    if x.dtype is dtype:
        return x * factor
    return torch.mul(x, factor, out=torch.empty_like(x, dtype=dtype))
