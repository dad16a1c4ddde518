"""broadcast <-> reduce; broadcast of a value that counts once <-> keeping it on src."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from allgrad._autograd.adjoint_pair import AdjointPair, makes_pair
from allgrad._autograd.transforms import apply
from allgrad._core import reductions
from allgrad._core.partition import Cut, apart_like, whole
from allgrad._wire import primitives as wire
from allgrad.collectives._inputs import (
    Grad,
    Nest,
    check_grad,
    check_rank,
    shapes,
    take,
    way_to_run,
)
from allgrad.collectives._pair_cache import recall, remember
from allgrad.collectives.gather import to_one_pair

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from allgrad._wire.primitives import Group, GroupLike

__all__ = ["broadcast", "reduce"]


def broadcast(
    x: Nest,
    src: int = 0,
    *,
    group: GroupLike = None,
    grad: Grad = "sum",
    async_op: bool = False,
) -> Nest:
    """Give every rank what ``src`` holds.

        rank 0   [ a ]         [ a ]
        rank 1   [ - ]   --->  [ a ]
        rank 2   [ - ]         [ a ]

    Every rank passes a tensor of the same shape and dtype; only the one of ``src`` is read.

    Gradient: ``reduce`` to ``src``. The value was used on every rank; what the others passed was
    not used at all.

        rank 0   A+B+C         [ A ]
        rank 1   0       <---  [ B ]
        rank 2   0             [ C ]

    ``grad="same"`` leaves ``src`` its own gradient (A), for when every rank does the same work.

    Cost: one collective each way.
    """
    known = None if async_op else recall("broadcast", x, group, src, grad)
    if known is not None:
        return apply(known, (x,), stop=grad == "none")[0]  # type: ignore[arg-type, return-value]
    ranks = wire.resolve("broadcast", group, lambda: f"src={src}, grad={grad}, {shapes(x)}")
    check_grad("broadcast", grad)
    root = check_rank("broadcast", ranks, "src", src)
    taken = take("broadcast", x)
    pair = _once_pair(ranks, root) if grad == "same" else _sum_pair(ranks, root)
    remember(pair, "broadcast", x, group, src, grad)
    run = way_to_run(async_op)
    return taken.run(lambda _, xs: run(pair, xs, stop=grad == "none"), async_op=async_op)


def reduce(
    x: Nest,
    dst: int = 0,
    op: reductions.Op = "sum",
    *,
    group: GroupLike = None,
    async_op: bool = False,
) -> Nest:
    """Reduce over ranks, and give ``dst`` the result; the others get zeros.

        rank 0   [ a ]         [ a+b+c ]
        rank 1   [ b ]   --->  [ 0 ]
        rank 2   [ c ]         [ 0 ]

    Gradient of a sum: ``broadcast`` from ``dst``. Gradients of the zeros go nowhere.

        rank 0   A         [ A ]
        rank 1   A   <---  [ - ]
        rank 2   A         [ - ]

    Use the result on every rank, if only by adding its sum to the loss: backward needs everyone.

    Cost: one collective each way. ``min``, ``max``, ``prod`` and ``logsumexp`` bring all pieces
    to ``dst``.
    """
    ranks = wire.resolve("reduce", group, lambda: f"dst={dst}, op={op}, {shapes(x)}")
    dst = check_rank("reduce", ranks, "dst", dst)
    taken = take("reduce", x)
    found = [reductions.find("reduce", op, t.dtype) for t in taken.tensors]
    return taken.run(
        lambda which, xs: _reduce(ranks, found[which[0]], xs, dst, async_op), async_op=async_op
    )


def _reduce(
    ranks: Group, reduction: reductions.Reduction, xs: Sequence[Tensor], dst: int, async_op: bool
) -> Any:
    if reduction.linear:
        divided_by = 1 if reduction.name == "sum" else ranks.size
        return way_to_run(async_op)(_sum_pair(ranks, dst, divided_by).adjoint, xs)
    rows = Cut((0,) * len(xs), ((1,) * ranks.size,) * len(xs))
    stacked = apply(to_one_pair(ranks, rows, dst), [x.unsqueeze(0) for x in xs])
    if ranks.rank == dst:
        return [reduction.stacked(t, 0) for t in stacked]
    # The sum of no rows: zeros that stay in the graph, for backward needs everyone.
    return [t.any(0) if t.dtype == torch.bool else t.sum(0, dtype=t.dtype) for t in stacked]


@makes_pair("broadcast")
def _sum_pair(ranks: Group, root: int, divided_by: int = 1) -> AdjointPair:
    def send(xs: Sequence[Tensor]) -> list[Tensor]:
        out = wire.broadcast(ranks, whole(xs), root)
        return apart_like(out if divided_by == 1 else out.div_(divided_by), xs)

    def collect(xs: Sequence[Tensor]) -> list[Tensor]:
        out = wire.reduce(ranks, whole(xs), root)
        return apart_like(out if divided_by == 1 else out.div_(divided_by), xs)

    return AdjointPair("broadcast", "reduce", send, collect)


@makes_pair("broadcast same")
def _once_pair(ranks: Group, src: int) -> AdjointPair:
    def keep(xs: Sequence[Tensor]) -> list[Tensor]:
        return [x.clone() if ranks.rank == src else torch.zeros_like(x) for x in xs]

    return AdjointPair("broadcast", "keep on src", _sum_pair(ranks, src).forward, keep)
