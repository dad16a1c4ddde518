"""all_reduce, its own adjoint; all_reduce of a value that counts once <-> share."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from allgrad._autograd.adjoint_pair import AdjointPair, makes_pair
from allgrad._autograd.transforms import apply
from allgrad._core import reductions
from allgrad._core.partition import Cut, apart_like, even, whole
from allgrad._wire import primitives as wire
from allgrad.collectives._inputs import Grad, Nest, check_grad, shapes, take, way_to_run
from allgrad.collectives._pair_cache import recall, remember
from allgrad.collectives.all_gather import gather_pair, once_pair, reduce_pieces

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from allgrad._wire.primitives import Group, GroupLike

__all__ = ["all_reduce", "share"]

# Up to here every rank gets all pieces in one message and reduces them itself; above, each rank
# reduces its share of the elements and the shares are gathered.
_WHOLE_PIECES_UP_TO = 256 * 1024


def all_reduce(
    x: Nest,
    op: reductions.Op = "sum",
    *,
    group: GroupLike = None,
    grad: Grad = "sum",
    async_op: bool = False,
) -> Nest:
    """Reduce over ranks, and give every rank the result.

        rank 0   [ a ]         [ a+b+c ]
        rank 1   [ b ]   --->  [ a+b+c ]
        rank 2   [ c ]         [ a+b+c ]

    Gradient of a sum: the sum over ranks. Each rank used the result in its own way, and each
    rank's piece is in all of them. A ``mean`` divides by the number of ranks; ``min``, ``max``
    (ties share equally), ``prod`` and ``logsumexp`` are differentiated as torch does it over the
    stacked pieces.

        rank 0   A+B+C         [ A ]
        rank 1   A+B+C   <---  [ B ]
        rank 2   A+B+C         [ C ]

    ``grad="same"`` passes a rank its own gradient (A, B, C), for when every rank does the same
    work with the result, so that the loss counts once. Nothing is sent for that, except by a
    large ``min``, ``max``, ``prod`` or ``logsumexp``.

    Cost: one collective each way; two for a large ``min``, ``max``, ``prod`` or ``logsumexp``.
    """
    known = None if async_op else recall("all_reduce", x, group, op, grad)
    if known is not None:
        return apply(known, (x,), stop=grad == "none")[0]  # type: ignore[arg-type, return-value]
    ranks = wire.resolve("all_reduce", group, lambda: f"op={op}, grad={grad}, {shapes(x)}")
    check_grad("all_reduce", grad)
    taken = take("all_reduce", x)
    found = [reductions.find("all_reduce", op, t.dtype) for t in taken.tensors]

    def run(which: list[int], xs: list[Tensor]) -> Any:
        reduction = found[which[0]]
        if not reduction.linear:
            return _reduce_pieces(ranks, reduction, xs, grad)
        divided_by = 1 if reduction.name == "sum" else ranks.size
        pair = _once_pair(ranks, divided_by) if grad == "same" else _sum_pair(ranks, divided_by)
        remember(pair, "all_reduce", x, group, op, grad)
        return way_to_run(async_op)(pair, xs, stop=grad == "none")

    return taken.run(run, async_op=async_op)


def _reduce_pieces(
    ranks: Group, reduction: reductions.Reduction, xs: Sequence[Tensor], grad: Grad
) -> Any:
    stop = grad == "none"
    make_pair = once_pair if grad == "same" else gather_pair
    if sum(x.numel() * x.element_size() for x in xs) * ranks.size <= _WHOLE_PIECES_UP_TO:
        rows = Cut((0,) * len(xs), ((1,) * ranks.size,) * len(xs))
        stacked = apply(make_pair(ranks, rows), [x.unsqueeze(0) for x in xs], stop=stop)
        return [reduction.stacked(t, 0) for t in stacked]
    shares = Cut((0,) * len(xs), tuple(even(x.numel(), ranks.size) for x in xs))
    own = reduce_pieces(ranks, reduction, [x.reshape(-1) for x in xs], shares)
    joined = apply(make_pair(ranks, shares), own, stop=stop)
    return [y.view(x.shape) for x, y in zip(xs, joined, strict=True)]


def share(x: Nest, *, group: GroupLike = None, async_op: bool = False) -> Nest:
    """Pass a value that all ranks hold to work that differs by rank.

        rank 0   [ v ]         [ v ]
        rank 1   [ v ]   --->  [ v ]
        rank 2   [ v ]         [ v ]

    Gradient: the sum over ranks. Each rank used the one value in its own way.

        rank 0   A+B+C         [ A ]
        rank 1   A+B+C   <---  [ B ]
        rank 2   A+B+C         [ C ]

    Cost: nothing forward (the result is a view of ``x``), one collective backward.
    """
    ranks = wire.resolve("share", group, lambda: shapes(x))
    pair = _once_pair(ranks, 1).adjoint
    run = way_to_run(async_op)
    return take("share", x).run(lambda _, xs: run(pair, xs), async_op=async_op)


@makes_pair("all_reduce")
def _sum_pair(ranks: Group, divided_by: int) -> AdjointPair:
    reduce = partial(_reduced, ranks, divided_by)
    return AdjointPair("all_reduce", "all_reduce", reduce, reduce)


@makes_pair("all_reduce same")
def _once_pair(ranks: Group, divided_by: int) -> AdjointPair:
    """all_reduce <-> share: terms on one side, on the other a sum that counts once."""

    def hand_over(xs: Sequence[Tensor]) -> list[Tensor]:
        return [x if divided_by == 1 else x / divided_by for x in xs]

    reduce = partial(_reduced, ranks, divided_by)
    return AdjointPair("all_reduce", "share", reduce, hand_over)


def _reduced(ranks: Group, by: int, xs: Sequence[Tensor]) -> list[Tensor]:
    copied = len(xs) > 1 or not xs[0].is_contiguous()
    total = wire.all_reduce(ranks, whole(xs), scratch=copied)
    return apart_like(total if by == 1 else total.div_(by), xs)
