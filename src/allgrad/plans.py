"""Which calls move the bytes, by backend, operation, size and world: measured facts, one table.

The wire asks here and does what it is told. Every answer depends only on what all ranks know
alike (the counts by rank and the dtype), so that all of them take the same way.

Gloo's own all_gather, reduce_scatter and reduce are two to three times slower than these ways:

| to do | piece up to 1 MiB | larger |
|---|---|---|
| all_gather | ``copies``: one all_to_all of copies | ``broadcasts``: one for each rank, into the result |
| reduce_scatter | ``exchange``: one all_to_all, then add | ``pairs``: peer by peer, added as they come |
| reduce | ``gather``: all to dst, then add | ``sends``: peer by peer, added as they come |

The ways for small pieces cost memory for all peers' pieces at once, those for large ones for one
piece. NCCL, and backends that were not measured, get their own call where it takes the sizes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["all_gather", "reduce", "reduce_scatter"]

SMALL = 1024 * 1024


def all_gather(backend: str, counts: Sequence[int], itemsize: int) -> str:
    """``copies`` | ``broadcasts`` | ``backend`` | ``backend_list``."""
    if backend == "gloo":
        return "copies" if max(counts) * itemsize <= SMALL else "broadcasts"
    if len(set(counts)) == 1:
        return "backend"
    return "backend_list" if backend == "nccl" else "broadcasts"


def reduce_scatter(backend: str, counts: Sequence[int], itemsize: int, *, on_host: bool) -> str:
    """``exchange`` | ``pairs`` | ``backend`` | ``backend_list``."""
    if backend == "gloo":
        # Gloo sends from peer to peer only what lies on the host.
        return "exchange" if max(counts) * itemsize <= SMALL or not on_host else "pairs"
    if len(set(counts)) == 1:
        return "backend"
    return "backend_list" if backend == "nccl" else "exchange"


def reduce(backend: str, nbytes: int, *, on_host: bool) -> str:
    """``gather`` | ``sends`` | ``backend``."""
    if backend != "gloo":
        return "backend"
    return "gather" if nbytes <= SMALL or not on_host else "sends"
