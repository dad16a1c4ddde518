"""Sizes by rank: even shares, blocks laid out one after another, and joining them again."""

from __future__ import annotations

from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["even", "join", "lay_out", "offsets", "plain"]


def even(total: int, parts: int) -> tuple[int, ...]:
    """Share ``total`` as evenly as possible; the first parts get the one more.

    >>> even(7, 3)
    (3, 2, 2)
    """
    least, more = divmod(total, parts)
    return (least + 1,) * more + (least,) * (parts - more)


def offsets(sizes: Sequence[int]) -> tuple[int, ...]:
    """Where each piece starts in the joined whole.

    >>> offsets((2, 0, 3))
    (0, 2, 2)
    """
    return tuple(accumulate(sizes, initial=0))[:-1]


def plain(x: Tensor) -> Tensor:
    """Return ``x`` as real contiguous memory, copied only if it is not that already."""
    return x.resolve_conj().resolve_neg().contiguous()


def lay_out(x: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
    """Cut ``x`` along ``dim`` into blocks of ``sizes`` and lay them one after another, flat.

    No copy for a contiguous tensor cut along its first dimension.

        [ a a b ]
        [ a a b ]   --->   [ a a a a b b ]
    """
    if prod(x.shape[:dim]) == 1 or sum(1 for s in sizes if s) <= 1:
        return plain(x).view(-1)
    return torch.cat([block.reshape(-1) for block in x.split(list(sizes), dim)])


def join(flat: Tensor, shape: Sequence[int], sizes: Sequence[int], dim: int) -> Tensor:
    """Undo ``lay_out``: blocks that lie one after another, joined along ``dim``.

    ``shape`` is the shape of a block; its length along ``dim`` is not looked at.
    No copy along the first dimension, one along any other.
    """
    before, after = list(shape[:dim]), list(shape[dim + 1 :])
    if prod(before) == 1 or sum(1 for s in sizes if s) <= 1:
        return flat.view([*before, sum(sizes), *after])
    counts = [size * prod(before) * prod(after) for size in sizes]
    blocks = flat.split(counts)
    views = [b.view([*before, size, *after]) for b, size in zip(blocks, sizes, strict=True)]
    return torch.cat(views, dim)
