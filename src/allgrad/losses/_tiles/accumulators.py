"""Sums in float32 that end as a tensor of 16 bits, in memory that they already have."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

__all__ = ["accumulator", "narrow", "panels", "wide_zeros"]


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums of this dtype are kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def panels(length: int, most: int) -> Iterator[slice]:
    """Cut a length into parts of at most ``most``."""
    return (slice(start, min(start + most, length)) for start in range(0, length, most))


def wide_zeros(like: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Zeros in the accumulator's dtype, in parts one below the other: two if ``dtype`` is half."""
    rows, *others = like.shape
    wide = accumulator(like.dtype)
    first = (rows + 1) // 2 if wide.itemsize == 2 * dtype.itemsize else rows
    parts = [first, rows - first] if first < rows else [rows]
    return [like.new_zeros((part, *others), dtype=wide) for part in parts]


def narrow(parts: list[Tensor], gain: Tensor, dtype: torch.dtype) -> Tensor:
    """Give the parts, times ``gain``, as one tensor of ``dtype``; they are used up.

    Two parts of twice the bytes end in the memory of the first, so that nothing is allocated:

        [ a a a a | b b b b ]         [ a a | b b | c c | d d ]
        [ c c c c | d d d d ]   --->
    """
    first = parts[0]
    if len(parts) == 1:
        return first.mul_(gain).to(dtype)
    rows = len(first) + len(parts[1])
    narrowed = first.view(-1).view(dtype)[: rows * first.stride(0)].view(rows, *first.shape[1:])
    # Row i lands where row i // 2 was: it must be read by then, and rows start to 2 start are.
    narrowed[:1] = first[:1] * gain
    start = 1
    while start < len(first):
        stop = min(2 * start, len(first))
        torch.mul(first[start:stop], gain, out=narrowed[start:stop])
        start = stop
    torch.mul(parts[1], gain, out=narrowed[len(first) :])
    return narrowed
