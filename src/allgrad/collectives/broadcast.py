"""broadcast <-> reduce; with ``grad="same"``, broadcast <-> keeping it on src."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from allgrad._autograd.adjoint_pair import AdjointPair, Made, makes_pair
from allgrad._autograd.transforms import apply
from allgrad._core import reductions
from allgrad._core.partition import Partition, divided_first, pack, unpack_like
from allgrad._wire import primitives as wire
from allgrad._wire.calls import of_stacked
from allgrad.collectives._inputs import (
    check_for_all,
    check_grad,
    check_rank,
    describe,
    named,
    run_known,
    take_leaves,
    take_reduced,
)
from allgrad.collectives._pair_cache import recall
from allgrad.collectives._size_exchange import await_others
from allgrad.collectives.gather import gather_pair

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from allgrad._wire.calls import Call
    from allgrad.types import Grad, GroupLike, Handle, Nest, Op, SumOrNone

__all__ = ["broadcast", "reduce"]


@overload
def broadcast(
    x: Nest,
    src: int = ...,
    *,
    group: GroupLike = ...,
    grad: Grad = ...,
    async_op: Literal[False] = ...,
) -> Nest: ...
@overload
def broadcast(
    x: Nest,
    src: int = ...,
    *,
    group: GroupLike = ...,
    grad: Grad = ...,
    async_op: Literal[True],
) -> Handle[Nest]: ...
def broadcast(
    x: Any,
    src: int = 0,
    *,
    group: GroupLike = None,
    grad: Grad = "sum",
    async_op: bool = False,
) -> Any:
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
    key = ("broadcast", x, group, src, grad)
    known = recall(*key) if type(src) is int else None
    if known is not None:
        return run_known(known, x, grad, async_op)
    call = wire.resolve("broadcast", group, lambda: describe(x, src=src, grad=grad))
    stop = check_grad(call, grad, same=True)
    root = check_rank("broadcast", call, "src", src)
    leaves = check_for_all(
        call, "broadcast", x, lambda: take_leaves("broadcast", x), exchanged=False
    )
    await_others(call, leaves)
    pair = (_same_pair if grad == "same" else _sum_pair)(named(call, leaves), root)
    return leaves.run(lambda _: pair, stop=stop, async_op=async_op, key=key)


@overload
def reduce(
    x: Nest,
    dst: int = ...,
    op: Op = ...,
    *,
    group: GroupLike = ...,
    grad: SumOrNone = ...,
    async_op: Literal[False] = ...,
) -> Nest: ...
@overload
def reduce(
    x: Nest,
    dst: int = ...,
    op: Op = ...,
    *,
    group: GroupLike = ...,
    grad: SumOrNone = ...,
    async_op: Literal[True],
) -> Handle[Nest]: ...
def reduce(
    x: Any,
    dst: int = 0,
    op: Op = "sum",
    *,
    group: GroupLike = None,
    grad: SumOrNone = "sum",
    async_op: bool = False,
) -> Any:
    """Reduce over ranks, and give ``dst`` the result; the others get zeros.

        rank 0   [ a ]         [ a+b+c ]
        rank 1   [ b ]   --->  [ 0 ]
        rank 2   [ c ]         [ 0 ]

    Gradient of a sum: ``broadcast`` from ``dst``. Gradients of the zeros go nowhere.

        rank 0   A         [ A ]
        rank 1   A   <---  [ - ]
        rank 2   A         [ - ]

    Use the result on every rank, if only by adding its sum to the loss: backward needs every rank.

    Cost: one collective each way. ``min``, ``max``, ``prod`` and ``logsumexp`` bring all pieces
    to ``dst``.
    """
    key = ("reduce", x, group, dst, op, grad)
    known = recall(*key) if type(dst) is int else None
    if known is not None:
        return run_known(known, x, grad, async_op)
    call = wire.resolve("reduce", group, lambda: describe(x, dst=dst, op=op))
    stop = check_grad(call, grad)
    root = check_rank("reduce", call, "dst", dst)
    leaves, found = take_reduced(call, x, op)
    await_others(call, leaves)
    call = named(call, leaves)
    if any(not reduction.linear for reduction in found):
        return leaves.call_each(
            lambda numbers, xs: _reduce_pieces(call, found[numbers[0]], xs, root, stop=stop),
            async_op=async_op,
        )

    def make_pair(numbers: list[int]) -> AdjointPair:
        divided_by = 1 if found[numbers[0]].name == "sum" else call.size
        return _sum_pair(call, root, divided_by).adjoint

    return leaves.run(make_pair, stop=stop, async_op=async_op, key=key)


def _reduce_pieces(
    call: Call, reduction: reductions.Reduction, xs: Sequence[Tensor], dst: int, *, stop: bool
) -> list[Tensor]:
    rows = Partition((0,) * len(xs), ((1,) * call.size,) * len(xs))
    stacked = apply(
        gather_pair(of_stacked(call), rows, dst), [x.unsqueeze(0) for x in xs], stop=stop
    )
    if call.rank == dst:
        return [reduction.stacked(t, 0) for t in stacked]
    return [reductions.zeros_of_no_rows(reduction, t) for t in stacked]


@makes_pair("broadcast")
def _sum_pair(call: Call, root: int, divided_by: int = 1) -> AdjointPair:
    def send(xs: Sequence[Tensor]) -> list[Tensor]:
        if divided_by == 1 and len(xs) == 1:  # most calls, without packing
            return [wire.broadcast(call, xs[0], root)]
        return _divided(wire.broadcast(call, pack(xs), root), xs, divided_by)

    def collect(xs: Sequence[Tensor]) -> list[Tensor]:
        if divided_by == 1 and len(xs) == 1:
            return [wire.reduce(call, xs[0], root)]
        x, by = divided_first(pack(xs), divided_by)
        return _divided(wire.reduce(call, x, root), xs, by)

    made = Made("broadcast", call, (root, divided_by))
    return AdjointPair("broadcast", "reduce", send, collect, made)


@makes_pair("broadcast same")
def _same_pair(call: Call, src: int) -> AdjointPair:
    def keep(xs: Sequence[Tensor]) -> list[Tensor]:
        return [x.clone() if call.rank == src else torch.zeros_like(x) for x in xs]

    made = Made("broadcast same", call, (src,))
    return AdjointPair("broadcast", "keep on src", _sum_pair(call, src).forward, keep, made)


def _divided(fresh: Tensor, xs: Sequence[Tensor], by: int) -> list[Tensor]:
    return unpack_like(fresh if by == 1 else fresh.div_(by), xs)
