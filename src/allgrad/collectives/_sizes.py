"""Sizes by rank: given by the caller, promised to be equal, divided evenly, or found out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from allgrad._core.partition import Partition, even
from allgrad._core.torch_internals import lengths_differ
from allgrad.collectives._inputs import Leaves, as_index, check_for_all, take_leaves
from allgrad.collectives._size_exchange import sizes_by_rank
from allgrad.errors import SizesError

if TYPE_CHECKING:
    from allgrad._wire.calls import Call
    from allgrad.types import Sizes

__all__ = ["divide", "given_sizes", "held_pieces", "partition_for"]


def given_sizes(name: str, call: Call, sizes: Sizes, argument: str = "sizes") -> tuple[int, ...]:
    """Raise unless sizes are one whole number from 0 up for each rank."""
    assert sizes is not None
    if isinstance(sizes, str):
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
    lengths = (t.shape[dim] for t, dim in zip(leaves.tensors, dims, strict=True))
    return Partition(
        dims, tuple(divide(call.name, call, length, sizes, argument) for length in lengths)
    )


def held_pieces(
    call: Call, x: object, dim: object, sizes: Sizes, operation: str | None = None
) -> tuple[Leaves, Partition]:
    """Check the pieces of a ragged whole, and find what each rank holds of it.

    With ``sizes=None`` a mistake on one rank is told to all of them in the size exchange.
    """
    operation = operation or call.name
    find_out = sizes is None and call.size > 1

    def check() -> tuple[Leaves, tuple[int, ...]]:
        return take_leaves(call.name, x).along(call.name, dim)

    leaves, dims = check_for_all(call, operation, x, check, exchanged=find_out)
    if not find_out:
        known = "equal" if sizes is None else sizes
        own = [t.shape[d] for t, d in zip(leaves.tensors, dims, strict=True)]
        return leaves, Partition(dims, tuple(_held(call, n, known) for n in own))
    return leaves, Partition(dims, sizes_by_rank(call, operation, leaves, dims))


def _held(call: Call, length: int, sizes: Sizes) -> tuple[int, ...]:
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
