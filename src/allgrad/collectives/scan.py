"""scan: prefix sums over ranks <-> suffix sums."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from allgrad._autograd.adjoint_pair import AdjointPair, makes_pair
from allgrad._autograd.transforms import apply
from allgrad._core import reductions
from allgrad._core.partition import Cut, apart_like, together
from allgrad._wire import primitives as wire
from allgrad.collectives._inputs import Nest, shapes, take, way_to_run
from allgrad.collectives.all_gather import gather_pair
from allgrad.errors import ReductionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from allgrad._wire.primitives import Group, GroupLike

__all__ = ["scan"]


def scan(
    x: Nest,
    op: reductions.Op = "sum",
    *,
    exclusive: bool = False,
    group: GroupLike = None,
    async_op: bool = False,
) -> Nest:
    """Reduce over this rank and those before it.

                                       exclusive=True
        rank 0   [ a ]         [ a ]       [ 0 ]
        rank 1   [ b ]   --->  [ a+b ]     [ a ]
        rank 2   [ c ]         [ a+b+c ]   [ a+b ]

    Gradient of a sum: the sum over this rank and those after it. The other reductions are
    differentiated as torch does it over the stacked pieces.

        rank 0   A+B+C         [ A ]
        rank 1   B+C     <---  [ B ]
        rank 2   C             [ C ]

    ``exclusive=True`` leaves the own piece out; rank 0 then gets the reduction of nothing: 0 for
    ``sum``, 1 for ``prod``, the lowest value for ``max`` and ``logsumexp``, the highest for
    ``min``.

    Cost: for ``sum`` and ``mean`` log2(ranks) messages of one piece each way; the other
    reductions gather all pieces.
    """
    ranks = wire.resolve("scan", group, lambda: f"op={op}, exclusive={exclusive}, {shapes(x)}")
    taken = take("scan", x)
    found = [reductions.find("scan", op, t.dtype) for t in taken.tensors]
    if exclusive and any(reduction.empty is None for reduction in found):
        raise ReductionError(
            f"scan: rank 0 would get the {found[0].name} of nothing.\n"
            "Use exclusive=False, or a sum divided by the rank where it is not 0."
        )
    return taken.run(
        lambda which, xs: _scan(ranks, found[which[0]], xs, exclusive, async_op), async_op=async_op
    )


def _scan(
    ranks: Group,
    reduction: reductions.Reduction,
    xs: Sequence[Tensor],
    exclusive: bool,
    async_op: bool,
) -> Any:
    if reduction.name == "sum":
        return way_to_run(async_op)(_prefix_pair(ranks, exclusive), xs)
    if reduction.linear:
        sums = apply(_prefix_pair(ranks, exclusive), xs)
        return [s / (ranks.rank + 1) for s in sums]
    rows = Cut((0,) * len(xs), ((1,) * ranks.size,) * len(xs))
    gathered = apply(gather_pair(ranks, rows), [x.unsqueeze(0) for x in xs])
    upto = [t[: ranks.rank if exclusive else ranks.rank + 1] for t in gathered]
    return [reduction.stacked(t, 0) if t.shape[0] else _of_nothing(reduction, t) for t in upto]


def _of_nothing(reduction: reductions.Reduction, no_rows: Tensor) -> Tensor:
    assert reduction.empty is not None
    nothing = no_rows.new_full(no_rows.shape[1:], reduction.empty(no_rows.dtype))
    if no_rows.dtype == torch.bool:
        return nothing
    # Adding the sum of no rows keeps rank 0 in the graph: backward needs everyone.
    return nothing + no_rows.sum(0, dtype=no_rows.dtype)


@makes_pair("scan")
def _prefix_pair(ranks: Group, exclusive: bool) -> AdjointPair:
    def sums(xs: Sequence[Tensor], step: int) -> list[Tensor]:
        return apart_like(_prefix(ranks, together(xs), step, exclusive), xs)

    return AdjointPair("scan", "suffix scan", lambda xs: sums(xs, 1), lambda xs: sums(xs, -1))


def _prefix(ranks: Group, flat: Tensor, step: int, exclusive: bool) -> Tensor:
    """Sum what this rank and ranks ``- step, - 2 step, ...`` hold, by doubling the distance."""
    total = _from_distance(ranks, flat, step) if exclusive else flat.clone()
    distance = 1
    while distance < ranks.size:
        total += _from_distance(ranks, total, step * distance)
        distance *= 2
    return total


def _from_distance(ranks: Group, flat: Tensor, distance: int) -> Tensor:
    """What the rank ``distance`` before this one holds; zeros where there is none."""
    to, source = ranks.rank + distance, ranks.rank - distance
    n = flat.numel()
    send = [n if rank == to else 0 for rank in range(ranks.size)]
    receive = [n if rank == source else 0 for rank in range(ranks.size)]
    sent = flat if any(send) else flat[:0]
    got = wire.all_to_all(ranks, sent, send, receive) if ranks.size > 1 else flat.new_empty(0)
    return got if any(receive) else flat.new_zeros(n)
