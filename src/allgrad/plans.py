"""Which calls move the bytes, by backend, operation, size and world: measured facts, one table.

The wire asks here and does what it is told. Every answer depends only on what all ranks know
alike (the counts by rank and the dtype), so that all of them take the same way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["all_gather", "reduce", "reduce_scatter"]

KIB = 1024
MIB = 1024 * KIB

# Gloo: its own all_gather and reduce_scatter are two to three times slower than these ways.
# NCCL and others: the backend's own call, where it takes the sizes.
GLOO_ALL_GATHER_COPIES_BELOW = 1 * MIB  # one all_to_all of copies; above, a broadcast per rank
GLOO_REDUCE_BY_GATHER_BELOW = 4 * MIB  # what dst would hold; above, the backend's reduce


def all_gather(backend: str, counts: Sequence[int], itemsize: int) -> str:
    """``copies`` | ``broadcasts`` | ``backend`` | ``backend_list``."""
    if backend == "nccl":
        return "backend" if len(set(counts)) == 1 else "backend_list"
    if backend == "gloo":
        largest = max(counts) * itemsize
        return "copies" if largest <= GLOO_ALL_GATHER_COPIES_BELOW else "broadcasts"
    return "backend" if len(set(counts)) == 1 else "broadcasts"


def reduce_scatter(backend: str, counts: Sequence[int]) -> str:
    """``exchange`` (all_to_all, then add) | ``backend`` | ``backend_list``."""
    if backend == "nccl":
        return "backend" if len(set(counts)) == 1 else "backend_list"
    if backend == "gloo" or len(set(counts)) != 1:
        return "exchange"
    return "backend"


def reduce(backend: str, world: int, nbytes: int) -> str:
    """``gather`` (all pieces to dst, then add) | ``backend``."""
    if backend == "gloo" and world * nbytes <= GLOO_REDUCE_BY_GATHER_BELOW:
        return "gather"
    return "backend"
