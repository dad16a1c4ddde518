"""Sizes by rank: tensors cut into blocks by rank, packed into one flat tensor, and joined again."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch

from allgrad._core.torch_internals import below_view_tracking, flatten_dense, unflatten_dense

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = [
    "Partition",
    "as_bytes",
    "dense",
    "divided_first",
    "even",
    "no_elements",
    "pack",
    "pack_flat",
    "real_memory",
    "unpack",
    "unpack_like",
]


def even(total: int, parts: int) -> tuple[int, ...]:
    """Divide ``total`` as evenly as possible; the first parts get one more.

    >>> even(7, 3)
    (3, 2, 2)
    """
    return tuple((total + parts - 1 - part) // parts for part in range(parts))


def real_memory(x: Tensor) -> Tensor:
    """``x`` as contiguous memory, copied only if it is not that already."""
    return x.resolve_conj().resolve_neg().contiguous()


def as_bytes(x: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, flat, in its own memory."""
    # A single element counts as contiguous whatever its stride.
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


def dense(xs: Sequence[Tensor]) -> Sequence[Tensor]:
    """The tensors with dense memory: the gradient of ``embedding(sparse=True)`` is sparse."""
    if all(x.layout is torch.strided for x in xs):
        return xs
    return [x.to_dense() for x in xs]


def divided_first(x: Tensor, by: int) -> tuple[Tensor, int]:
    """What is added up for a mean, and what is left to divide the sum by.

    A sum of float16 may be infinite where the mean is not (test_mean_of_large_halves).
    """
    return (x / by, 1) if by != 1 and x.dtype is torch.float16 else (x, by)


def pack_flat(xs: Sequence[Tensor]) -> Tensor:
    """Whole tensors, one after another, flat. No copy for a single contiguous one."""
    if len(xs) == 1:
        return _flat(real_memory(xs[0]))
    flat: Tensor = flatten_dense(xs)
    return flat


def pack(xs: Sequence[Tensor]) -> Tensor:
    """The same, but a single tensor is left as it is: a view costs time too."""
    return xs[0] if len(xs) == 1 else pack_flat(xs)


def unpack_like(flat: Tensor, xs: Sequence[Tensor]) -> list[Tensor]:
    """Undo ``pack`` or ``pack_flat`` of tensors with these shapes, without a copy."""
    if len(xs) == 1 and flat.dim() == xs[0].dim():
        return [flat]
    # One call of torch, which gives tensors without elements another shape.
    if len(xs) > 1 and all(map(torch.numel, xs)):
        return list(unflatten_dense(flat, xs))
    return unpack(flat, [x.shape for x in xs])


def unpack(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """The same for given shapes."""
    if len(shapes) == 1:
        return [_shaped(flat, shapes[0])]
    parts = flat.split([prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def no_elements(xs: Sequence[Tensor]) -> Tensor:
    """No elements of the tensors, flat."""
    return xs[0].new_empty(0)


@dataclass(frozen=True, slots=True)
class Partition:
    """How several tensors are cut: each along its own dim, into its own sizes by rank.

    tensor 0   [ a a | b ]               packed, by rank:
    tensor 1   [ c | d d ]     <--->     [ a a c | b d d ]

    A single tensor cut along its first dimension is packed as it is: its counts are its sizes.
    """

    dims: tuple[int, ...]
    sizes: tuple[tuple[int, ...], ...]

    def is_rows(self, xs: Sequence[Tensor]) -> bool:
        """Tell whether a single tensor travels as it is, counted in rows."""
        return len(xs) == 1 and self.dims[0] == 0

    def counts(self, xs: Sequence[Tensor]) -> Sequence[int]:
        """What belongs to each rank, all tensors together: elements, or rows of a single tensor."""
        if len(xs) == 1:
            if self.is_rows(xs):
                return self.sizes[0]
            each = _elements_per_step(xs[0], self.dims[0])
            return [size * each for size in self.sizes[0]]
        steps = [_elements_per_step(x, dim) for x, dim in zip(xs, self.dims, strict=True)]
        by_rank = zip(*self.sizes, strict=True)
        return [sum(s * o for s, o in zip(sizes, steps, strict=True)) for sizes in by_rank]

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

    def empty_shapes(self, xs: Sequence[Tensor]) -> list[list[int]]:
        """The shapes of empty blocks."""
        return [_with_length(x.shape, dim, 0) for x, dim in zip(xs, self.dims, strict=True)]

    def select(self, numbers: Sequence[int]) -> Partition:
        """The same for some of the tensors, by number."""
        if len(numbers) == len(self.dims):
            return self
        return Partition(
            tuple(self.dims[i] for i in numbers), tuple(self.sizes[i] for i in numbers)
        )

    def own_blocks(self, xs: Sequence[Tensor], rank: int) -> list[Tensor]:
        """One rank's blocks, as views of the tensors."""
        return [
            x.narrow(dim, sum(sizes[:rank]), sizes[rank])
            for x, dim, sizes in zip(xs, self.dims, self.sizes, strict=True)
        ]

    def pack_own(self, xs: Sequence[Tensor]) -> Tensor:
        """One rank's blocks, as they lie among those of all ranks."""
        return xs[0] if self.is_rows(xs) else pack_flat(xs)

    def pack_none(self, xs: Sequence[Tensor]) -> Tensor:
        """No blocks at all, packed in the same way."""
        return xs[0].new_empty((0, *xs[0].shape[1:])) if self.is_rows(xs) else no_elements(xs)

    def pack_blocks(self, xs: Sequence[Tensor]) -> Tensor:
        """Cut the tensors and pack the blocks, rank after rank.

        No copy for a single contiguous tensor cut along its first dimension.
        """
        if self.is_rows(xs):
            return xs[0]
        if len(xs) == 1 and self._is_in_order(xs[0]):
            return _flat(real_memory(xs[0]))
        blocks = [
            x.split(list(sizes), dim)
            for x, sizes, dim in zip(xs, self.sizes, self.dims, strict=True)
        ]
        return torch.cat([b.reshape(-1) for of_rank in zip(*blocks, strict=True) for b in of_rank])

    def join(self, packed: Tensor, xs: Sequence[Tensor]) -> list[Tensor]:
        """Undo ``pack_blocks``; ``xs`` tell the lengths of the other dimensions.

        No copy for a single tensor along its first dimension, one otherwise.
        """
        if self.is_rows(xs):
            return [packed]
        if len(xs) == 1 and self._is_in_order(xs[0]):
            return [_shaped(packed, _with_length(xs[0].shape, self.dims[0], sum(self.sizes[0])))]
        ranks = range(len(self.sizes[0]))
        shapes = [shape for rank in ranks for shape in self.shapes(xs, rank)]
        blocks = unpack(packed, shapes)
        return [torch.cat(blocks[i :: len(xs)], dim) for i, dim in enumerate(self.dims)]

    def _is_in_order(self, x: Tensor) -> bool:
        """Tell whether the blocks of the first tensor lie one after another in it as it is."""
        dim = self.dims[0]
        if dim == 0 or prod(x.shape[:dim]) == 1:
            return True
        return sum(1 for size in self.sizes[0] if size) <= 1


def _flat(x: Tensor) -> Tensor:
    return x if x.dim() == 1 else x.view(-1)  # a view that changes nothing costs time too


def _shaped(flat: Tensor, shape: Sequence[int]) -> Tensor:
    if flat.dim() == len(shape):
        return flat
    # The result of a call: a view that was made under no_grad could not be changed in place by what
    # requires grad (test_results_without_gradient_may_be_changed_in_place).
    with below_view_tracking():
        return flat.view(shape)


def _elements_per_step(x: Tensor, dim: int) -> int:
    """How many elements there are for each step along ``dim``."""
    shape = x.shape
    if len(shape) == 1:
        return 1
    length = shape[dim]  # dividing is faster than multiplying all others
    return x.numel() // length if length else prod(shape[:dim]) * prod(shape[dim + 1 :])


def _with_length(shape: Sequence[int], dim: int, length: int) -> list[int]:
    changed = list(shape)
    changed[dim] = length
    return changed
