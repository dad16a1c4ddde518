"""Copies between devices: small tensors packed into buckets, CUDA copies on a side stream.

Tensors here are plain; autograd and torch.func are above.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, TypeAlias

import torch

from allgrad._core.partition import real_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    Route: TypeAlias = tuple[torch.device, ...]

__all__ = ["add_on", "buckets", "copy_to", "join_on", "pack", "unpack", "wait_for_host_copies"]

_SMALL_BYTES = 1 << 20  # packing a larger tensor saves no time
_BUCKET_BYTES = 1 << 25  # limits the memory that packing takes


def buckets(xs: Sequence[Tensor], routes: Sequence[Route]) -> list[list[int]]:
    """Which tensors are copied together: small ones of one dtype between the same devices."""
    found: list[list[int]] = []
    filling: dict[object, tuple[list[int], int]] = {}
    for j, (x, route) in enumerate(zip(xs, routes, strict=True)):
        if x.nbytes > _SMALL_BYTES or len(set(route)) == 1:
            found.append([j])
            continue
        bucket, nbytes = filling.get((x.dtype, route), ([], _BUCKET_BYTES))
        if nbytes + x.nbytes > _BUCKET_BYTES or not bucket:
            bucket, nbytes = [], 0
            found.append(bucket)
        bucket.append(j)
        filling[x.dtype, route] = bucket, nbytes + x.nbytes
    return found


def pack(xs: Sequence[Tensor], route: Route) -> Tensor:
    """Join the tensors of a bucket into one flat tensor; a single tensor is returned as it is."""
    if len(xs) == 1:
        return xs[0]
    flat = [x.reshape(-1) for x in xs]
    if flat[0].device.type != "cpu" or all(device.type != "cuda" for device in route):
        return torch.cat(flat)
    # A copy from pinned memory does not block the host; torch reuses the memory only afterwards.
    staged = torch.empty(sum(map(len, flat)), dtype=flat[0].dtype, pin_memory=True)
    return torch.cat(flat, out=staged)


def unpack(packed: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Undo :func:`pack`, each tensor in memory of its own."""
    if len(shapes) == 1:
        return [packed]
    xs = [packed.new_empty(shape) for shape in shapes]
    flat = [x.view(-1) for x in xs]
    torch.split_with_sizes_copy(packed, [len(x) for x in flat], out=flat)
    return xs


def copy_to(x: Tensor, device: torch.device) -> Tensor:
    """A new contiguous copy of ``x`` on ``device``."""
    if x.device == device:
        return x.clone(memory_format=torch.contiguous_format)
    # The host may read a result at once, so a copy to the host must be complete.
    blocking = device.type == "cpu"

    def copy() -> Tensor:
        return x.to(
            device, non_blocking=not blocking, copy=True, memory_format=torch.contiguous_format
        )

    return _on_copy_stream([x], device, copy)


def add_on(device: torch.device, xs: Sequence[Tensor]) -> Tensor:
    """A new contiguous tensor on ``device``: the sum of ``xs``, whatever devices they are on."""
    if len(xs) == 1:
        return copy_to(xs[0], device)
    local = (x if x.device == device else copy_to(x, device) for x in xs)
    total = real_memory(next(local) + next(local))
    for x in local:
        total += x
    return total


def join_on(
    device: torch.device, pieces: Sequence[Tensor], sizes: Sequence[int], dim: int
) -> Tensor:
    """A new contiguous tensor on ``device``: the pieces joined along ``dim``."""
    if all(piece.device == device for piece in pieces):
        return real_memory(torch.cat(list(pieces), dim))
    shape = list(pieces[0].shape)
    shape[dim] = sum(sizes)

    def copy() -> Tensor:
        joined = torch.empty(shape, dtype=pieces[0].dtype, device=device)
        for part, piece in zip(joined.split(list(sizes), dim), pieces, strict=True):
            part.copy_(piece, non_blocking=device.type != "cpu")
        return joined

    return _on_copy_stream(pieces, device, copy)


def wait_for_host_copies(device: torch.device) -> None:
    """Wait until every copy from the host to ``device`` has read its source."""
    if device.type == "cuda":
        _copy_stream(device).synchronize()


def _on_copy_stream(
    sources: Sequence[Tensor], device: torch.device, copy: Callable[[], Tensor]
) -> Tensor:
    """Run a copy; from the host to CUDA on a side stream, which the current stream waits for."""
    if device.type != "cuda" or any(x.device.type != "cpu" for x in sources):
        return copy()
    current, side = torch.cuda.current_stream(device), _copy_stream(device)
    with torch.cuda.stream(side):
        copied = copy()
    current.wait_stream(side)
    # The memory belongs to the side stream: the allocator must not reuse it while the current
    # stream still reads it.
    copied.record_stream(current)
    return copied


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
