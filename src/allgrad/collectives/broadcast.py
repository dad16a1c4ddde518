"""broadcast <-> reduce; broadcast of a value that counts once <-> keeping it on src."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from allgrad import reductions, wire
from allgrad.adjoint_pair import AdjointPair
from allgrad.collectives.arguments import Grad, check_grad, check_rank, check_tensor
from allgrad.collectives.gather import to_one_pair
from allgrad.ragged import plain
from allgrad.transforms import apply

if TYPE_CHECKING:
    from torch import Tensor

    from allgrad.wire import Group, GroupLike

__all__ = ["broadcast", "reduce"]


def broadcast(x: Tensor, src: int = 0, *, group: GroupLike = None, grad: Grad = "sum") -> Tensor:
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
    ranks = wire.resolve("broadcast", group)
    check_tensor("broadcast", x)
    check_grad("broadcast", grad)
    src = check_rank("broadcast", ranks, "src", src)
    pair = _once_pair(ranks, src) if grad == "same" else _sum_pair(ranks, src)
    return apply(pair, x, stop=grad == "none")


def reduce(
    x: Tensor, dst: int = 0, op: reductions.Op = "sum", *, group: GroupLike = None
) -> Tensor:
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
    ranks = wire.resolve("reduce", group)
    check_tensor("reduce", x)
    dst = check_rank("reduce", ranks, "dst", dst)
    reduction = reductions.find("reduce", op, x.dtype)
    if reduction.linear:
        divided_by = 1 if reduction.name == "sum" else ranks.size
        return apply(_sum_pair(ranks, dst, divided_by).adjoint, x)
    rows = apply(to_one_pair(ranks, (1,) * ranks.size, 0, dst), x.unsqueeze(0))
    if ranks.rank == dst:
        return reduction.stacked(rows, 0)
    return torch.zeros_like(x) if x.dtype == torch.bool else rows.sum(0, dtype=x.dtype)


def _sum_pair(ranks: Group, root: int, divided_by: int = 1) -> AdjointPair:
    def send(x: Tensor) -> Tensor:
        return _divide(wire.broadcast(ranks, plain(x).view(-1), root), divided_by).view(x.shape)

    def collect(x: Tensor) -> Tensor:
        return _divide(wire.reduce(ranks, plain(x).view(-1), root), divided_by).view(x.shape)

    return AdjointPair("broadcast", "reduce", send, collect)


def _once_pair(ranks: Group, src: int) -> AdjointPair:
    def keep(x: Tensor) -> Tensor:
        return x.clone() if ranks.rank == src else torch.zeros_like(x)

    return AdjointPair("broadcast", "keep on src", _sum_pair(ranks, src).forward, keep)


def _divide(fresh: Tensor, by: int) -> Tensor:
    return fresh if by == 1 else fresh.div_(by)
