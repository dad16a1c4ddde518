"""Sizes by rank that need no message: given by the caller, promised to be equal, divided evenly."""

from __future__ import annotations

from typing import TYPE_CHECKING

from allgrad._core.partition import Partition, even
from allgrad._core.torch_internals import lengths_differ
from allgrad.collectives._inputs import Leaves, as_index
from allgrad.errors import SizesError

if TYPE_CHECKING:
    from allgrad._wire.calls import Call
    from allgrad.types import Sizes

__all__ = ["divide", "given_sizes", "held_sizes", "partition_for", "reusable"]


def reusable(sizes: Sizes) -> Sizes:
    """Sizes that every leaf of a nest can read: an iterator is used up once."""
    return tuple(sizes) if hasattr(sizes, "__next__") else sizes  # type: ignore[arg-type]


def given_sizes(name: str, call: Call, sizes: Sizes, argument: str = "sizes") -> tuple[int, ...]:
    """Raise unless sizes are one whole number from 0 up for each rank."""
    assert sizes is not None
    single = not hasattr(sizes, "__iter__") or getattr(sizes, "ndim", 1) == 0
    if single or isinstance(sizes, str):
        raise SizesError(
            f'{name}: {argument}={sizes!r}.\nGive None, "equal", or one size for each rank.'
        )
    values = [as_index(size) for size in sizes]
    if len(values) != call.size:
        raise SizesError(
            f"{name}: {argument} has {len(values)} entries for a group of {call.size} ranks.\n"
            "Give one size for each rank, in rank order."
        )
    whole = tuple(value for value in values if value is not None and value >= 0)
    if len(whole) != len(values):
        raise SizesError(f"{name}: {argument}={list(sizes)}.\nSizes are whole numbers from 0 up.")
    return whole


def divide(
    name: str, call: Call, length: int, sizes: Sizes, argument: str = "sizes"
) -> tuple[int, ...]:
    """How a length that this rank holds is divided among the ranks."""
    if sizes is None:
        return even(length, call.size)
    if isinstance(sizes, str) and sizes == "equal":
        if length % call.size:
            raise SizesError(
                f'{name}: {argument}="equal", but {length} does not divide by {call.size} ranks.\n'
                "Leave it out to divide as evenly as possible, or give one size for each rank."
            )
        return (length // call.size,) * call.size
    values = given_sizes(name, call, sizes, argument)
    if lengths_differ(sum(values), length):
        raise SizesError(
            f"{name}: {argument}={list(values)} add up to {sum(values)}, but x has {length} there.\n"
            "Give sizes that add up to x's length along dim."
        )
    return values


def partition_for(
    call: Call, leaves: Leaves, dims: tuple[int, ...], sizes: Sizes, argument: str = "sizes"
) -> Partition:
    """How this rank's leaves are divided among the ranks."""
    sizes = reusable(sizes)
    lengths = (t.shape[dim] for t, dim in zip(leaves.tensors, dims, strict=True))
    return Partition(
        dims, tuple(divide(call.name, call, length, sizes, argument) for length in lengths)
    )


def held_sizes(call: Call, length: int, sizes: Sizes) -> tuple[int, ...]:
    """What each rank holds, as the caller says."""
    if isinstance(sizes, str) and sizes == "equal":
        return (length,) * call.size
    values = given_sizes(call.name, call, sizes)
    if lengths_differ(values[call.rank], length):
        raise SizesError(
            f"{call.name}: sizes={list(values)} say that rank {call.rank} holds "
            f"{values[call.rank]}, but it holds {length}.\n"
            "Give what each rank holds along dim, in rank order."
        )
    return values
