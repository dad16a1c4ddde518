"""Sizes by rank: even shares, tensors cut into blocks by rank, laid out flat, and joined again."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from allgrad._core.torch_internals import flatten_dense, unflatten_dense

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "Cut",
    "apart",
    "apart_like",
    "even",
    "nothing",
    "plain",
    "together",
    "whole",
]


def even(total: int, parts: int) -> tuple[int, ...]:
    """Share ``total`` as evenly as possible; the first parts get the one more.

    >>> even(7, 3)
    (3, 2, 2)
    """
    return tuple((total + parts - 1 - part) // parts for part in range(parts))


def plain(x: Tensor) -> Tensor:
    """Return ``x`` as real contiguous memory, copied only if it is not that already."""
    return x.resolve_conj().resolve_neg().contiguous()


def together(xs: Sequence[Tensor]) -> Tensor:
    """Whole tensors, one after another, flat. No copy for a single contiguous one."""
    if len(xs) == 1:
        return _flat(plain(xs[0]))
    flat: Tensor = flatten_dense(xs)
    return flat


def whole(xs: Sequence[Tensor]) -> Tensor:
    """The same for what is not cut: a single tensor keeps its shape, for a view costs time too."""
    if len(xs) == 1:
        return plain(xs[0])
    return together(xs)


def apart_like(flat: Tensor, xs: Sequence[Tensor]) -> list[Tensor]:
    """Undo ``together`` or ``whole`` of tensors with these shapes, without a copy."""
    if len(xs) == 1 and flat.dim() == xs[0].dim():
        return [flat]
    # In one call of torch, which gives tensors without elements another shape.
    if len(xs) > 1 and all(map(torch.numel, xs)):
        return list(unflatten_dense(flat, xs))
    return apart(flat, [x.shape for x in xs])


def apart(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """The same for given shapes."""
    if len(shapes) == 1:
        return [_shaped(flat, shapes[0])]
    parts = flat.split([prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def nothing(xs: Sequence[Tensor]) -> Tensor:
    """No elements of the tensors, flat."""
    return xs[0].new_empty(0)


@dataclass(frozen=True, slots=True)
class Cut:
    """How several tensors are cut: each along its own dim, into its own sizes by rank.

    tensor 0   [ a a | b ]               flat, by rank:
    tensor 1   [ c | d d ]     <--->     [ a a c | b d d ]

    A single tensor cut along its first dimension lies by rank as it is: its counts are its sizes.
    """

    dims: tuple[int, ...]
    sizes: tuple[tuple[int, ...], ...]

    def by_rows(self, xs: Sequence[Tensor]) -> bool:
        """Tell whether what travels is a single tensor as it is, counted in rows."""
        return len(xs) == 1 and self.dims[0] == 0

    def counts(self, xs: Sequence[Tensor]) -> Sequence[int]:
        """What belongs to each rank, all tensors together: elements, or rows of a single tensor."""
        if len(xs) == 1:
            if self.by_rows(xs):
                return self.sizes[0]
            each = _others(xs[0], self.dims[0])
            return [size * each for size in self.sizes[0]]
        others = [_others(x, dim) for x, dim in zip(xs, self.dims, strict=True)]
        by_rank = zip(*self.sizes, strict=True)
        return [sum(s * o for s, o in zip(sizes, others, strict=True)) for sizes in by_rank]

    def shapes(self, xs: Sequence[Tensor], rank: int) -> list[list[int]]:
        """The shapes of one rank's blocks."""
        return [
            _with_length(x.shape, dim, sizes[rank])
            for x, dim, sizes in zip(xs, self.dims, self.sizes, strict=True)
        ]

    def lengths(self, rank: int) -> list[int]:
        """The length of one rank's block of each tensor, along its dim."""
        return [sizes[rank] for sizes in self.sizes]

    def totals(self) -> list[int]:
        """The length of each tensor along its dim."""
        return [sum(sizes) for sizes in self.sizes]

    def none(self, xs: Sequence[Tensor]) -> list[list[int]]:
        """The shapes of empty blocks."""
        return [_with_length(x.shape, dim, 0) for x, dim in zip(xs, self.dims, strict=True)]

    def of(self, which: Sequence[int]) -> Cut:
        """The same for some of the tensors, by number."""
        if len(which) == len(self.dims):
            return self
        return Cut(tuple(self.dims[i] for i in which), tuple(self.sizes[i] for i in which))

    def own(self, xs: Sequence[Tensor], rank: int) -> list[Tensor]:
        """One rank's blocks, as views of the tensors."""
        return [
            x.narrow(dim, sum(sizes[:rank]), sizes[rank])
            for x, dim, sizes in zip(xs, self.dims, self.sizes, strict=True)
        ]

    def pieces(self, xs: Sequence[Tensor]) -> Tensor:
        """One rank's blocks, as they lie among those of all ranks."""
        return plain(xs[0]) if self.by_rows(xs) else together(xs)

    def nothing(self, xs: Sequence[Tensor]) -> Tensor:
        """No blocks at all, in the same way."""
        return xs[0].new_empty((0, *xs[0].shape[1:])) if self.by_rows(xs) else nothing(xs)

    def lay_out(self, xs: Sequence[Tensor]) -> Tensor:
        """Cut the tensors and lay the blocks flat, rank after rank.

        No copy for a single contiguous tensor cut along its first dimension.
        """
        if self.by_rows(xs):
            return plain(xs[0])
        if len(xs) == 1 and self._in_order(xs[0]):
            return _flat(plain(xs[0]))
        blocks = [
            x.split(list(sizes), dim)
            for x, sizes, dim in zip(xs, self.sizes, self.dims, strict=True)
        ]
        return torch.cat([b.reshape(-1) for of_rank in zip(*blocks, strict=True) for b in of_rank])

    def join(self, flat: Tensor, xs: Sequence[Tensor]) -> list[Tensor]:
        """Undo ``lay_out``; ``xs`` tell the other lengths.

        No copy for a single tensor along its first dimension, one otherwise.
        """
        if self.by_rows(xs):
            return [flat]
        if len(xs) == 1 and self._in_order(xs[0]):
            return [_shaped(flat, _with_length(xs[0].shape, self.dims[0], sum(self.sizes[0])))]
        ranks = range(len(self.sizes[0]))
        shapes = [shape for rank in ranks for shape in self.shapes(xs, rank)]
        blocks = apart(flat, shapes)
        return [torch.cat(blocks[i :: len(xs)], dim) for i, dim in enumerate(self.dims)]

    def _in_order(self, x: Tensor) -> bool:
        """Tell whether the blocks of the first tensor lie one after another in it as it is."""
        dim = self.dims[0]
        if dim == 0 or prod(x.shape[:dim]) == 1:
            return True
        return sum(1 for size in self.sizes[0] if size) <= 1


def _flat(x: Tensor) -> Tensor:
    return x if x.dim() == 1 else x.view(-1)  # a view that changes nothing costs time too


def _shaped(flat: Tensor, shape: Sequence[int]) -> Tensor:
    return flat if flat.dim() == len(shape) else flat.view(shape)


def _others(x: Tensor, dim: int) -> int:
    """How many elements there are for each step along ``dim``."""
    shape = x.shape
    if len(shape) == 1:
        return 1
    length = shape[dim]  # dividing is quicker than multiplying all others
    return x.numel() // length if length else prod(shape[:dim]) * prod(shape[dim + 1 :])


def _with_length(shape: Sequence[int], dim: int, length: int) -> list[int]:
    changed = list(shape)
    changed[dim] = length
    return changed
