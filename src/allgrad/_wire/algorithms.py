"""Which calls move the bytes, by backend, operation, size and world: measured facts, one table.

The wire asks here and does what it is told. Every answer depends only on what all ranks know
alike (the counts by rank and the dtype), so that all of them take the same way.

Gloo's own calls take up to five times as long as these ways, on the host. Small messages take few
steps, larger ones keep every rank at work; the limits are where that was best, or nearly so, both
with 4 ranks on 2 cores and with a core for every rank:

| to do | small | larger |
|---|---|---|
| all_reduce | up to 256 KiB, of two ranks 4 MiB, ``hub``: to one rank, which sends everyone the sum | ``shares``: each rank adds up one, and sends it to all |
| all_gather | up to 64 KiB in all, ``hub``, or ``copies`` between two: one all_to_all | ``pairs``: peer to peer, all at once |
| reduce_scatter | up to 64 KiB in all, ``hub``; blocks up to 128 KiB, ``exchange``: one all_to_all, then add | ``pairs``, added as they come |
| all_to_all, equal | up to 64 KiB in all, ``hub``, or ``backend`` between two; blocks up to 128 KiB, ``turns``: to lower ranks, then to higher | ``pairs`` |
| broadcast | up to 4 MiB in all, ``sends``: to every peer at once | ``shares``: one to each peer, who pass them on |
| reduce | up to 4 MiB in all, ``sends``: peer by peer, added as they come | ``shares``: each peer adds up one |

Of two ranks nothing else goes by a hub, and no broadcast in shares.
``copies``, ``exchange`` and the hub take memory for all peers' pieces at once, what is added as it comes
for 8 MiB of them. Gloo sends from peer to peer only what lies on the host; a GPU's tensors go by
``copies`` or ``broadcasts`` (one for each rank, into the result), ``exchange``, ``backend``, and ``gather``: all to
dst, then add. NCCL, and backends that were not measured, get their own call where it takes the sizes.
For experiments, ``with plans.using(all_gather="broadcasts"):`` takes one way whatever the table says.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from allgrad.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

__all__ = [
    "WAYS",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "reduce",
    "reduce_scatter",
    "using",
]

# Bytes: of one rank's piece, of one block between two ranks, or of all ranks together.
COPIES_UP_TO = SUM_AT_HUB_UP_TO = 256 * 1024
EXCHANGE_UP_TO = 128 * 1024  # a block
SUM_OF_TWO_UP_TO = 4 * 1024 * 1024
HUB_UP_TO, SENDS_UP_TO = 64 * 1024, 4 * 1024 * 1024  # all together
WAYS = {
    "all_gather": ("hub", "copies", "pairs", "broadcasts", "backend", "backend_list"),
    "reduce_scatter": ("hub", "exchange", "pairs", "backend", "backend_list"),
    "all_reduce": ("hub", "shares", "backend"),
    "all_to_all": ("hub", "turns", "pairs", "backend"),
    "reduce": ("sends", "shares", "gather", "backend"),
    "broadcast": ("sends", "shares", "backend"),
}
_chosen: dict[str, str] = {}


@contextlib.contextmanager
def using(**ways: str) -> Generator[None]:
    """Within this block, on every rank alike, move bytes these ways: ``using(reduce="sends")``.

    A way may ask more than the table's choice would: ``backend`` takes equal counts only.
    """
    for operation, way in ways.items():
        if way not in WAYS.get(operation, ()):
            known = "; ".join(f"{name}: {', '.join(found)}" for name, found in WAYS.items())
            raise InputError(f"plans.using: {operation} has no way {way!r}.\nThere are {known}.")
    before = dict(_chosen)
    _chosen.update(ways)
    try:
        yield
    finally:
        _chosen.clear()
        _chosen.update(before)


def all_gather(backend: str, counts: Sequence[int], row: int, *, on_host: bool) -> str:
    """``hub`` | ``copies`` | ``pairs`` | ``broadcasts`` | ``backend`` | ``backend_list``."""
    if chosen := _chosen.get("all_gather"):
        return chosen
    if backend == "gloo":
        if not on_host:
            return "copies" if max(counts) * row <= COPIES_UP_TO else "broadcasts"
        if sum(counts) * row > HUB_UP_TO:
            return "pairs"
        return "hub" if len(counts) > 2 else "copies"
    if len(set(counts)) == 1:
        return "backend"
    return "backend_list" if backend == "nccl" else "broadcasts"


def reduce_scatter(backend: str, counts: Sequence[int], row: int, *, on_host: bool) -> str:
    """``hub`` | ``exchange`` | ``pairs`` | ``backend`` | ``backend_list``."""
    if chosen := _chosen.get("reduce_scatter"):
        return chosen
    if backend == "gloo":
        if on_host and len(counts) > 2 and sum(counts) * row <= HUB_UP_TO:
            return "hub"
        small = max(counts) * row <= EXCHANGE_UP_TO
        return "exchange" if small or not on_host else "pairs"
    if len(set(counts)) == 1:
        return "backend"
    return "backend_list" if backend == "nccl" else "exchange"


def all_reduce(backend: str, ranks: int, nbytes: int, *, on_host: bool) -> str:
    """``hub`` | ``shares`` | ``backend``."""
    if chosen := _chosen.get("all_reduce"):
        return chosen
    if backend != "gloo" or not on_host:
        return "backend"
    small = SUM_OF_TWO_UP_TO if ranks == 2 else SUM_AT_HUB_UP_TO
    return "hub" if nbytes <= small else "shares"


def all_to_all(backend: str, ranks: int, nbytes: int, *, on_host: bool) -> str:
    """``hub`` | ``turns`` | ``pairs`` | ``backend``, for blocks of one size between all ranks, known to be so."""
    if chosen := _chosen.get("all_to_all"):
        return chosen
    if backend != "gloo" or not on_host:
        return "backend"
    if ranks * nbytes <= HUB_UP_TO:
        return "hub" if ranks > 2 else "backend"
    return "turns" if nbytes <= ranks * EXCHANGE_UP_TO else "pairs"


def reduce(backend: str, ranks: int, nbytes: int, *, on_host: bool) -> str:
    """``sends`` | ``shares`` | ``gather`` | ``backend``."""
    if chosen := _chosen.get("reduce"):
        return chosen
    if backend != "gloo":
        return "backend"
    if not on_host:
        return "gather"
    return "sends" if ranks == 2 or ranks * nbytes <= SENDS_UP_TO else "shares"


def broadcast(backend: str, ranks: int, nbytes: int, *, on_host: bool) -> str:
    """``sends`` | ``shares`` | ``backend``."""
    if chosen := _chosen.get("broadcast"):
        return chosen
    if backend != "gloo" or not on_host:
        return "backend"
    return "sends" if ranks == 2 or ranks * nbytes <= SENDS_UP_TO else "shares"
