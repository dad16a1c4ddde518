"""Pieces with the edges of their neighbours."""

from __future__ import annotations

import operator
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.functional import pad

from allgrad.collectives.all_to_all import all_to_all
from allgrad.errors import InputError, PieceMismatch, SizesError, rank_table
from allgrad.nn._ranks import find_place, gather_numbers, refuse, require_tensors

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
    require_tensors("halo_exchange", group, x=x)
    place = find_place("halo_exchange", group)
    halo = _Halo(before, after, _truth(wrap))
    sizes = lengths_along("halo_exchange", x, dim, sizes, group, halo=halo)
    before, after, dim = _whole(before), _whole(after), _whole(dim) % x.dim()
    ahead, behind = _neighbours(sizes, bool(wrap))
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


_NOT_WHOLE = -(2**63)  # what a rank tells of an argument that is no whole number


def _whole(number: object) -> int:
    """The number as an int; ``_NOT_WHOLE`` for anything else, also for True and 1.0."""
    try:
        found = _NOT_WHOLE if isinstance(number, bool) else operator.index(number)  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001  no rank may wait for this one
        return _NOT_WHOLE
    return found if abs(found) < 2**63 else _NOT_WHOLE


def _truth(wrap: object) -> int:
    """1 or 0; ``_NOT_WHOLE`` for what is neither, as several numbers."""
    try:
        return int(bool(wrap))
    except Exception:  # noqa: BLE001  no rank may wait for this one
        return _NOT_WHOLE


class _Halo(NamedTuple):
    """What a rank asks for."""

    before: int = 0
    after: int = 0
    wrap: int = 0


class _Facts(NamedTuple):
    """What a rank tells of its piece and of its arguments."""

    dims: int
    dim: int
    halo: _Halo
    shape: tuple[int, ...]

    @classmethod
    def of_row(cls, row: Sequence[int]) -> _Facts:
        halo = _Halo(row[2], row[3], row[4])
        return cls(row[0], row[1], halo, tuple(row[5 : 5 + row[0]]))

    def row(self) -> list[int]:
        return [
            self.dims,
            *map(_whole, self.numbers()),
            self.halo.wrap,
            *self.shape,
            *[0] * 16,
        ][:21]

    def numbers(self) -> tuple[int, int, int]:
        return self.dim, self.halo.before, self.halo.after

    def __str__(self) -> str:
        dim, before, after = ("?" if n == _NOT_WHOLE else repr(n) for n in self.numbers())
        wrap = {0: "False", 1: "True"}.get(self.halo.wrap, "?")
        return f"{self.shape}, dim={dim}, before={before}, after={after}, wrap={wrap}"

    def problem(self) -> str | None:
        dim, before, after = map(_whole, self.numbers())
        if not -self.dims <= dim < self.dims:
            return f"no dim from {-self.dims} to {self.dims - 1}"
        if _NOT_WHOLE in {before, after}:
            return "no whole number"
        if self.halo.wrap == _NOT_WHOLE:
            return "neither wrapped nor not"
        return "shorter than nothing" if min(before, after) < 0 else None

    def alike(self) -> tuple[object, ...]:
        """What must be the same on every rank."""
        at = self.dim % self.dims
        return at, self.halo, self.shape[:at], self.shape[at + 1 :]

    def length(self) -> int:
        return self.shape[self.dim]


def lengths_along(
    call: str,
    x: Tensor,
    dim: int,
    sizes: Sequence[int] | None,
    group: GroupLike,
    *,
    halo: _Halo = _Halo(),  # noqa: B008 - it cannot be changed
) -> tuple[int, ...]:
    """What each rank holds along ``dim``.

    Unless given, it is found out with all other arguments, so that a mistake of one rank raises on all.
    """
    own, place = _Facts(x.dim(), dim, halo, tuple(x.shape)), find_place(call, group)
    by_rank = [own] * place.world
    if sizes is None:
        by_rank = [_Facts.of_row(row) for row in gather_numbers(call, own.row(), x, group)]
        by_rank[place.rank] = own  # with what is no whole number, which the others do not see
    problems = [facts.problem() for facts in by_rank]
    marks = {rank: problem for rank, problem in enumerate(problems) if problem is not None}
    if marks:
        rule = f"{call}: dim is one of the tensor's, and a halo is a whole number from 0 up."
        shown = [str(facts) for facts in by_rank]
        wrong = InputError(rank_table(rule, shown, marks, "Correct the arguments of these ranks."))
        if sizes is None:  # every rank has seen it
            raise wrong
        refuse(call, group, wrong)
    if sizes is not None:
        if len(sizes) != place.world or sizes[place.rank] != own.length():
            problem = SizesError(
                f"{call}: sizes={list(sizes)} do not fit rank {place.rank} of {place.world}, which "
                f"holds {own.length()} along dim {dim}.\nGive what each rank holds, in rank order."
            )
            refuse(call, group, problem)
        return tuple(sizes)
    kinds = [facts.alike() for facts in by_rank]
    usual = max(kinds, key=kinds.count)
    odd = {rank: "differs" for rank, kind in enumerate(kinds) if kind != usual}
    if odd:
        raise PieceMismatch(
            rank_table(
                f"{call}: pieces may differ along the split dim only.",
                [str(facts) for facts in by_rank],
                odd,
                "Give every rank the same lengths in the other dims, and the same arguments.",
            )
        )
    return tuple(facts.length() for facts in by_rank)
