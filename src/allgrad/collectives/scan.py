"""scan: prefix sums over ranks <-> suffix sums."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from allgrad import reductions, wire
from allgrad.adjoint_pair import AdjointPair
from allgrad.collectives.all_gather import gather_pair
from allgrad.collectives.arguments import check_tensor
from allgrad.errors import ReductionError
from allgrad.ragged import plain
from allgrad.transforms import apply

if TYPE_CHECKING:
    from torch import Tensor

    from allgrad.wire import Group, GroupLike

__all__ = ["scan"]


def scan(
    x: Tensor, op: reductions.Op = "sum", *, exclusive: bool = False, group: GroupLike = None
) -> Tensor:
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
    ranks = wire.resolve("scan", group)
    check_tensor("scan", x)
    reduction = reductions.find("scan", op, x.dtype)
    if reduction.empty is None and exclusive:
        raise ReductionError(
            f"scan: rank 0 would get the {reduction.name} of nothing.\n"
            "Use exclusive=False, or a sum divided by the rank where it is not 0."
        )
    if reduction.linear:
        sums = apply(_prefix_pair(ranks, exclusive=exclusive), x)
        return sums if reduction.name == "sum" else sums / (ranks.rank + 1)
    rows = apply(gather_pair(ranks, (1,) * ranks.size, 0), x.unsqueeze(0))
    before = rows[: ranks.rank if exclusive else ranks.rank + 1]
    if before.shape[0]:
        return reduction.stacked(before, 0)
    assert reduction.empty is not None
    nothing = x.new_full(x.shape, reduction.empty(x.dtype))
    if x.dtype == torch.bool:
        return nothing
    # Adding the empty sum keeps rank 0 in the graph: backward needs everyone.
    return nothing + before.sum(0, dtype=x.dtype)


def _prefix_pair(ranks: Group, *, exclusive: bool) -> AdjointPair:
    return AdjointPair(
        "scan",
        "suffix scan",
        lambda x: _prefix(ranks, x, 1, exclusive=exclusive),
        lambda x: _prefix(ranks, x, -1, exclusive=exclusive),
    )


def _prefix(ranks: Group, x: Tensor, step: int, *, exclusive: bool) -> Tensor:
    """Sum what ranks ``- step, - 2 step, ...`` hold, by doubling the distance."""
    total = plain(x).view(-1)
    if exclusive:
        total = _from_distance(ranks, total, step)
    distance = 1
    while distance < ranks.size:
        total = total + _from_distance(ranks, total, step * distance)
        distance *= 2
    return (total.clone() if total.data_ptr() == x.data_ptr() else total).view(x.shape)


def _from_distance(ranks: Group, flat: Tensor, distance: int) -> Tensor:
    """What the rank ``distance`` before this one holds; zeros where there is none."""
    to, source = ranks.rank + distance, ranks.rank - distance
    n = flat.numel()
    send = [n if rank == to else 0 for rank in range(ranks.size)]
    receive = [n if rank == source else 0 for rank in range(ranks.size)]
    sent = flat if any(send) else flat.new_empty(0)
    got = wire.all_to_all(ranks, sent, send, receive) if ranks.size > 1 else flat.new_empty(0)
    return got if any(receive) else flat.new_zeros(n)
