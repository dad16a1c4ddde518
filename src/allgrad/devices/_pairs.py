"""Between the devices of one process: adjoint pairs with lists of tensors at both ends.

The pairs stand first, then what makes them differentiable, then how their memory is moved.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from allgrad._core.partition import real_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    Route: TypeAlias = tuple[torch.device, ...]

__all__ = ["ListPair", "apply", "copy_pair", "finish_host_copies", "join_pair"]


@dataclass(frozen=True, slots=True, eq=False)
class ListPair:
    """A linear map ``A`` from a list of tensors to a list of tensors, and its adjoint ``A*``.

    Both give new contiguous tensors, and name dimensions from the front, so that a batch
    dimension may be appended at the end.
    """

    forward: Callable[[Sequence[Tensor]], list[Tensor]]
    backward: Callable[[Sequence[Tensor]], list[Tensor]]

    @property
    def adjoint(self) -> ListPair:
        return ListPair(self.backward, self.forward)


def copy_pair(home: Sequence[torch.device], away: Sequence[Sequence[torch.device]]) -> ListPair:
    """Copy tensor ``j`` from ``home[j]`` to every ``away[i][j]`` <-> add its copies up again.

        home   [ a ] [ b ]     <-->     away[0]   [ a ] [ b ]
                                        away[1]   [ a ] [ b ]

    The copies are listed row after row.
    """
    count = len(home)
    routes = [(home[j], *(row[j] for row in away)) for j in range(count)]

    def copy(xs: Sequence[Tensor]) -> list[Tensor]:
        rows: list[list[Any]] = [[None] * count for _ in away]
        for parcel in _parcels(xs, routes):
            first, shapes = parcel[0], [xs[j].shape for j in parcel]
            packed = _packed([xs[j] for j in parcel], routes[first])
            for row, places in zip(rows, away, strict=True):
                arrived = _unpacked(_moved(packed, places[first]), shapes)
                for j, x in zip(parcel, arrived, strict=True):
                    row[j] = x
        return [x for row in rows for x in row]

    def add(xs: Sequence[Tensor]) -> list[Tensor]:
        rows = [xs[i * count : (i + 1) * count] for i in range(len(away))]
        sums: list[Any] = [None] * count
        for parcel in _parcels(rows[0], routes):
            first, shapes = parcel[0], [xs[j].shape for j in parcel]
            packed = [_packed([row[j] for j in parcel], routes[first]) for row in rows]
            for j, x in zip(parcel, _unpacked(_sum(packed, home[first]), shapes), strict=True):
                sums[j] = x
        return sums

    return ListPair(copy, add)


def join_pair(
    home: torch.device, away: Sequence[torch.device], sizes: Sequence[int], dim: int
) -> ListPair:
    """Join the pieces along ``dim`` on ``home`` <-> cut them apart again.

    away[0]   [ a a ]     <-->     home   [ a a | b ]
    away[1]   [ b ]
    """

    def join(pieces: Sequence[Tensor]) -> list[Tensor]:
        if all(piece.device == home for piece in pieces):
            return [real_memory(torch.cat(list(pieces), dim))]
        shape = list(pieces[0].shape)
        shape[dim] = sum(sizes)

        def fill() -> Tensor:
            joined = torch.empty(shape, dtype=pieces[0].dtype, device=home)
            for place, piece in zip(joined.split(list(sizes), dim), pieces, strict=True):
                place.copy_(piece, non_blocking=home.type != "cpu")
            return joined

        return [_beside_work(pieces, home, fill)]

    def cut(joined: Sequence[Tensor]) -> list[Tensor]:
        parts = joined[0].split(list(sizes), dim)
        return [_moved(part, place) for part, place in zip(parts, away, strict=True)]

    return ListPair(join, cut)


# From a pair to a differentiable function.


def apply(pair: ListPair, xs: Sequence[Tensor]) -> list[Tensor]:
    """Run the pair's map on ``xs``, differentiable to any order and under torch.func.

    ``xs`` are all floating-point or complex, or none of them is. Autograd marks their results
    alike: all require grad when any of ``xs`` does.
    """
    run: Callable[..., tuple[Tensor, ...]] = _Apply.apply
    return list(run(pair, *xs))


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(pair: ListPair, *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(pair.forward(xs))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.pair, ctx.results = inputs[0], len(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *apply(ctx.pair.adjoint, gradients)

    @staticmethod
    def jvp(ctx: Any, _pair: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        floating = [tangent for tangent in tangents if tangent is not None]
        assert len(floating) in {0, len(tangents)}  # integers have none, and travel by themselves
        return tuple(apply(ctx.pair, floating)) if floating else (None,) * ctx.results

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], pair: ListPair, *xs: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        batched = [
            x.unsqueeze(-1).expand(*x.shape, info.batch_size) if at is None else x.movedim(at, -1)
            for x, at in zip(xs, in_dims[1:], strict=True)
        ]
        results = tuple(apply(pair, batched))
        return results, (-1,) * len(results)


# Memory. What arrives here is plain: autograd and torch.func are above.

_SMALL = 1 << 20  # bytes; a larger tensor gains nothing from company
_PARCEL = 1 << 25  # bytes; bounds the memory that packing takes


def _parcels(xs: Sequence[Tensor], routes: Sequence[Route]) -> list[list[int]]:
    """Which tensors travel together: small ones of one dtype on one route between devices."""
    parcels: list[list[int]] = []
    filling: dict[object, tuple[list[int], int]] = {}
    for j, (x, route) in enumerate(zip(xs, routes, strict=True)):
        if x.nbytes > _SMALL or len(set(route)) == 1:
            parcels.append([j])
            continue
        parcel, weight = filling.get((x.dtype, route), ([], _PARCEL))
        if weight + x.nbytes > _PARCEL or not parcel:
            parcel, weight = [], 0
            parcels.append(parcel)
        parcel.append(j)
        filling[x.dtype, route] = parcel, weight + x.nbytes
    return parcels


def _packed(xs: Sequence[Tensor], route: Route) -> Tensor:
    """The tensors of a parcel laid one after another, flat; a single one is left as it is."""
    if len(xs) == 1:
        return xs[0]
    flat = [x.reshape(-1) for x in xs]
    if flat[0].device.type != "cpu" or all(device.type != "cuda" for device in route):
        return torch.cat(flat)
    # Out of pinned memory the copy needs no host; torch does not reuse it before that is done.
    staged = torch.empty(sum(map(len, flat)), dtype=flat[0].dtype, pin_memory=True)
    return torch.cat(flat, out=staged)


def _unpacked(packed: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Undo ``_packed``, each tensor in memory of its own."""
    if len(shapes) == 1:
        return [packed]
    xs = [packed.new_empty(shape) for shape in shapes]
    flat = [x.view(-1) for x in xs]
    torch.split_with_sizes_copy(packed, [len(x) for x in flat], out=flat)
    return xs


def _moved(x: Tensor, device: torch.device) -> Tensor:
    """A new contiguous copy of ``x`` on ``device``."""
    if x.device == device:
        return x.clone(memory_format=torch.contiguous_format)
    # The host may read a copy as soon as it has it, so one that goes there must be complete.
    waits = device.type == "cpu"

    def fill() -> Tensor:
        return x.to(
            device, non_blocking=not waits, copy=True, memory_format=torch.contiguous_format
        )

    return _beside_work([x], device, fill)


def _sum(xs: Sequence[Tensor], device: torch.device) -> Tensor:
    """A new contiguous tensor on ``device``: the sum of ``xs``, wherever they are."""
    if len(xs) == 1:
        return _moved(xs[0], device)
    here = (x if x.device == device else _moved(x, device) for x in xs)
    total = real_memory(next(here) + next(here))
    for x in here:
        total += x
    return total


def _beside_work(
    sources: Sequence[Tensor], device: torch.device, fill: Callable[[], Tensor]
) -> Tensor:
    """Fill a tensor; from the host to CUDA on a stream beside the current one, which waits for it."""
    if device.type != "cuda" or any(x.device.type != "cpu" for x in sources):
        return fill()
    current, lane = torch.cuda.current_stream(device), _lane(device)
    with torch.cuda.stream(lane):
        filled = fill()
    current.wait_stream(lane)
    # The memory is the lane's: it must not be given out again while the current stream uses it.
    filled.record_stream(current)
    return filled


@cache
def _lane(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def finish_host_copies(device: torch.device) -> None:
    """Wait until what was copied to ``device`` has left the host's memory."""
    if device.type == "cuda":
        _lane(device).synchronize()
