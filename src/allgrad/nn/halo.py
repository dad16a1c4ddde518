"""Pieces with the edges of their neighbours."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from allgrad.collectives.all_to_all import all_to_all
from allgrad.errors import InputError, PieceMismatch, SizesError, rank_table
from allgrad.nn._ranks import find_place, gather_numbers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from allgrad.types import GroupLike

__all__ = ["halo_exchange", "lengths_along"]


def halo_exchange(
    x: Tensor,
    dim: int,
    before: int,
    after: int,
    wrap: bool = False,
    *,
    sizes: Sequence[int] | None = None,
    group: GroupLike = None,
) -> Tensor:
    """Put the last ``before`` elements of the rank before in front, the first ``after`` of the next behind.

        before=1, after=1                             wrap=True
        rank 0   [ a b ]            [ 0 a b c ]       [ f a b c ]
        rank 1   [ c ]       --->   [ b c d ]         [ b c d ]
        rank 2   [ d e f ]          [ c d e f 0 ]     [ c d e f a ]

    The twin of ``torch.nn.functional.pad`` on the joined tensor, with zeros or circular, of which
    each rank gets its window. A rank without elements gets none and is passed over: its
    neighbours see each other. A halo longer than the piece it comes from raises.

    Gradient: an edge's gradient comes back and is added, exact to any order. An element is used
    where it was sent, so there is no ``grad=`` to choose.

        rank 0   [ A   B+b ]            [ . A B c ]
        rank 1   [ C+c+c ]       <---   [ b C d ]
        rank 2   [ D+d E F ]            [ c D E F . ]

    ``sizes`` are what each rank holds along ``dim``.

    Cost: one message to each neighbour each way, plus one size exchange unless ``sizes`` is given.
    """
    place = find_place("halo_exchange", group)
    dim = _dim_from_front(x, dim)
    if before < 0 or after < 0:
        raise InputError(
            f"halo_exchange: before={before}, after={after}.\nGive whole numbers from 0 up."
        )
    sizes = lengths_along("halo_exchange", x, dim, sizes, group)
    ahead, behind = _neighbours(sizes, wrap)
    given = [max(before * (r in behind), after * (r in ahead)) for r in range(place.world)]
    short = {r: f"gives {n}" for r, n in enumerate(given) if sizes[r] < n}
    if short:
        raise SizesError(
            rank_table(
                f"halo_exchange: a halo of {before} before and {after} after is longer than a piece.",
                [f"holds {size} along dim {dim}" for size in sizes],
                short,
                "Give larger pieces to these ranks, or none.",
            )
        )
    # What goes to a rank is what it puts in front, then what it puts behind: two ranks in a ring
    # are neighbours on both sides.
    me, n = place.rank, x.shape[dim]
    parts, send = [x.narrow(dim, 0, 0)], [0] * place.world
    for rank in range(place.world):
        if behind.get(me) == rank:
            parts.append(x.narrow(dim, n - before, before))
            send[rank] += before
        if ahead.get(me) == rank:
            parts.append(x.narrow(dim, 0, after))
            send[rank] += after
    receive = [
        before * (ahead.get(me) == rank) + after * (behind.get(me) == rank)
        for rank in range(place.world)
    ]
    got = all_to_all(torch.cat(parts, dim), dim, send_sizes=send, recv_sizes=receive, group=group)
    has_front, has_back = me in ahead, me in behind
    front_first = not (has_front and has_back) or ahead[me] <= behind[me]
    lengths = [before * has_front, after * has_back]
    edges = got.split(lengths if front_first else lengths[::-1], dim)
    front, back = edges if front_first else edges[::-1]
    joined = torch.cat([front, x, back], dim)
    if not n:
        return joined
    missing = [0, 0] * (x.dim() - 1 - dim) + [before - lengths[0], after - lengths[1]]
    return pad(joined, missing) if any(missing) else joined


def _neighbours(sizes: Sequence[int], wrap: bool) -> tuple[dict[int, int], dict[int, int]]:
    """The rank before each rank that holds something, and the rank after it."""
    holders = [rank for rank, size in enumerate(sizes) if size]
    behind = dict(pairwise(holders))
    if wrap and holders:
        behind[holders[-1]] = holders[0]
    return {after: before for before, after in behind.items()}, behind


def lengths_along(
    call: str, x: Tensor, dim: int, sizes: Sequence[int] | None, group: GroupLike
) -> tuple[int, ...]:
    """What each rank holds along ``dim``; unless given, found out, with all other dims alike."""
    if sizes is not None:
        place = find_place(call, group)
        if len(sizes) != place.world or sizes[place.rank] != x.shape[dim]:
            raise SizesError(
                f"{call}: sizes={list(sizes)} do not fit rank {place.rank} of {place.world}, which "
                f"holds {x.shape[dim]} along dim {dim}.\nGive what each rank holds, in rank order."
            )
        return tuple(sizes)
    shape = [*x.shape, *[0] * 8][:8]
    by_rank = gather_numbers(call, [x.dim(), dim, *shape], x, group)
    others = [(f[0], f[1], *(n for d, n in enumerate(f[2:]) if d != f[1])) for f in by_rank]
    usual = max(others, key=others.count)
    odd = {rank: "differs" for rank, other in enumerate(others) if other != usual}
    if odd:
        raise PieceMismatch(
            rank_table(
                f"{call}: pieces may differ along the split dim only.",
                [f"{tuple(f[2 : 2 + f[0]])}, dim {f[1]}" for f in by_rank],
                odd,
                "Give every rank the same lengths in the other dims.",
            )
        )
    return tuple(f[2 + f[1]] for f in by_rank)


def _dim_from_front(x: Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise InputError(
            f"halo_exchange: dim={dim} is out of range for shape {tuple(x.shape)}.\n"
            f"Give a dim from {-x.dim()} to {x.dim() - 1}."
        )
    return dim % x.dim()
