"""Adjoint pairs between the devices of one process, and their autograd.

A pair maps a list of tensors to a list of tensors. How the memory is copied is in
:mod:`allgrad.devices._copies`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from allgrad.devices._copies import add_on, buckets, copy_to, join_on, pack, unpack

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

__all__ = ["ListPair", "apply", "copy_pair", "join_pair"]


@dataclass(frozen=True, slots=True, eq=False)
class ListPair:
    """A linear map ``A`` from a list of tensors to a list of tensors, and its adjoint ``A*``.

    Both give new contiguous tensors, and count dimensions from the front, so that a batch
    dimension may be appended at the end.
    """

    forward: Callable[[Sequence[Tensor]], list[Tensor]]
    backward: Callable[[Sequence[Tensor]], list[Tensor]]

    @property
    def adjoint(self) -> ListPair:
        return ListPair(self.backward, self.forward)


def copy_pair(home: Sequence[torch.device], away: Sequence[Sequence[torch.device]]) -> ListPair:
    """Copy tensor ``j`` from ``home[j]`` to every ``away[i][j]`` <-> add its copies.

        home   [ a ] [ b ]     <-->     away[0]   [ a ] [ b ]
                                        away[1]   [ a ] [ b ]

    The copies are listed row after row.
    """
    count = len(home)
    routes = [(home[j], *(row[j] for row in away)) for j in range(count)]

    def copy(xs: Sequence[Tensor]) -> list[Tensor]:
        rows: list[list[Any]] = [[None] * count for _ in away]
        for bucket in buckets(xs, routes):
            first, shapes = bucket[0], [xs[j].shape for j in bucket]
            packed = pack([xs[j] for j in bucket], routes[first])
            for row, devices in zip(rows, away, strict=True):
                copies = unpack(copy_to(packed, devices[first]), shapes)
                for j, x in zip(bucket, copies, strict=True):
                    row[j] = x
        return [x for row in rows for x in row]

    def add(xs: Sequence[Tensor]) -> list[Tensor]:
        rows = [xs[i * count : (i + 1) * count] for i in range(len(away))]
        sums: list[Any] = [None] * count
        for bucket in buckets(rows[0], routes):
            first, shapes = bucket[0], [xs[j].shape for j in bucket]
            packed = [pack([row[j] for j in bucket], routes[first]) for row in rows]
            for j, x in zip(bucket, unpack(add_on(home[first], packed), shapes), strict=True):
                sums[j] = x
        return sums

    return ListPair(copy, add)


def join_pair(
    home: torch.device, away: Sequence[torch.device], sizes: Sequence[int], dim: int
) -> ListPair:
    """Join the pieces along ``dim`` on ``home`` <-> split them again.

    away[0]   [ a a ]     <-->     home   [ a a | b ]
    away[1]   [ b ]
    """

    def join(pieces: Sequence[Tensor]) -> list[Tensor]:
        return [join_on(home, pieces, sizes, dim)]

    def split(joined: Sequence[Tensor]) -> list[Tensor]:
        pieces = joined[0].split(list(sizes), dim)
        return [copy_to(piece, device) for piece, device in zip(pieces, away, strict=True)]

    return ListPair(join, split)


def apply(pair: ListPair, xs: Sequence[Tensor]) -> list[Tensor]:
    """Run the pair's map on ``xs``, differentiable to any order and under torch.func.

    Either all of ``xs`` are floating-point or complex, or none of them is. When one of them
    requires grad, all results do.
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
        assert len(floating) in {0, len(tangents)}  # integer tensors are in calls of their own
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
