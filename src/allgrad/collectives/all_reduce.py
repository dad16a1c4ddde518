"""all_reduce, its own adjoint; with ``grad="same"``, all_reduce <-> share."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from allgrad._autograd.adjoint_pair import AdjointPair, Made, makes_pair
from allgrad._autograd.transforms import apply
from allgrad._core.partition import Partition, divided_first, even, pack, unpack_like
from allgrad._core.torch_internals import is_zero_tensor
from allgrad._wire import primitives as wire
from allgrad._wire.calls import of_flat, of_stacked
from allgrad.collectives._inputs import (
    check_grad,
    describe,
    named,
    run_known,
    take_leaves,
    take_reduced,
)
from allgrad.collectives._pair_cache import recall
from allgrad.collectives._size_exchange import await_others
from allgrad.collectives.all_gather import gather_pair, reduce_pieces, same_pair

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from allgrad._core import reductions
    from allgrad._wire.calls import Call
    from allgrad.types import Grad, GroupLike, Handle, Nest, Op, SumOrNone

__all__ = ["all_reduce", "share"]

# Up to here every rank gets all pieces in one message and reduces them itself; above, each rank
# reduces its part of the elements and the parts are gathered.
_WHOLE_PIECES_UP_TO = 256 * 1024


@overload
def all_reduce(
    x: Nest,
    op: Op = ...,
    *,
    group: GroupLike = ...,
    grad: Grad = ...,
    async_op: Literal[False] = ...,
) -> Nest: ...
@overload
def all_reduce(
    x: Nest,
    op: Op = ...,
    *,
    group: GroupLike = ...,
    grad: Grad = ...,
    async_op: Literal[True],
) -> Handle[Nest]: ...
def all_reduce(
    x: Any,
    op: Op = "sum",
    *,
    group: GroupLike = None,
    grad: Grad = "sum",
    async_op: bool = False,
) -> Any:
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
    key = ("all_reduce", x, group, op, grad)
    known = recall(*key)
    if known is not None:
        return run_known(known, x, grad, async_op)
    return _checked_all_reduce(x, op, group, grad, async_op, key)


def _checked_all_reduce(  # noqa: PLR0917
    x: Any, op: Op, group: GroupLike, grad: Grad, async_op: bool, key: tuple[Any, ...]
) -> Any:
    """A call like no call before. Apart, so that a call from the cache makes no closures."""
    call = wire.resolve("all_reduce", group, lambda: describe(x, op=op, grad=grad))
    stop = check_grad(call, grad, same=True)
    leaves, found = take_reduced(call, x, op)
    await_others(call, leaves)
    call = named(call, leaves)
    if any(not reduction.linear for reduction in found):
        return leaves.call_each(
            lambda numbers, xs: _reduce_pieces(call, found[numbers[0]], xs, grad),
            async_op=async_op,
        )

    def make_pair(numbers: list[int]) -> AdjointPair:
        divided_by = 1 if found[numbers[0]].name == "sum" else call.size
        return (_same_pair if grad == "same" else _sum_pair)(call, divided_by)

    return leaves.run(make_pair, stop=stop, async_op=async_op, key=key)


def _reduce_pieces(
    call: Call, reduction: reductions.Reduction, xs: Sequence[Tensor], grad: Grad
) -> Any:
    stop = grad == "none"
    make_pair = same_pair if grad == "same" else gather_pair
    if sum(x.numel() * x.element_size() for x in xs) * call.size <= _WHOLE_PIECES_UP_TO:
        rows = Partition((0,) * len(xs), ((1,) * call.size,) * len(xs))
        stacked = apply(make_pair(of_stacked(call), rows), [x.unsqueeze(0) for x in xs], stop=stop)
        return [reduction.stacked(t, 0) for t in stacked]
    call = of_flat(call)
    parts = Partition((0,) * len(xs), tuple(even(x.numel(), call.size) for x in xs))
    own = reduce_pieces(call, reduction, [x.reshape(-1) for x in xs], parts, stop=stop)
    joined = apply(make_pair(call, parts), own, stop=stop)
    return [y.view(x.shape) for x, y in zip(xs, joined, strict=True)]


@overload
def share(
    x: Nest,
    *,
    group: GroupLike = ...,
    grad: SumOrNone = ...,
    async_op: Literal[False] = ...,
) -> Nest: ...
@overload
def share(
    x: Nest,
    *,
    group: GroupLike = ...,
    grad: SumOrNone = ...,
    async_op: Literal[True],
) -> Handle[Nest]: ...
def share(
    x: Any,
    *,
    group: GroupLike = None,
    grad: SumOrNone = "sum",
    async_op: bool = False,
) -> Any:
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
    call = wire.resolve("share", group, lambda: describe(x))
    stop = check_grad("share", grad)
    leaves = take_leaves("share", x)
    pair = _same_pair(named(call, leaves), 1).adjoint
    return leaves.run(lambda _: pair, stop=stop, async_op=async_op)


@makes_pair("all_reduce")
def _sum_pair(call: Call, divided_by: int) -> AdjointPair:
    reduce = partial(_reduced, call, divided_by)
    made = Made("all_reduce", call, (divided_by,))
    return AdjointPair("all_reduce", "all_reduce", reduce, reduce, made)


@makes_pair("all_reduce same")
def _same_pair(call: Call, divided_by: int) -> AdjointPair:
    """all_reduce <-> share: terms on one side, on the other a sum that all ranks use alike."""

    def hand_over(xs: Sequence[Tensor]) -> list[Tensor]:
        if divided_by != 1:
            return [x / divided_by for x in xs]
        # torch's tensors of zeros have no memory that a caller could read.
        return [torch.zeros_like(x) if is_zero_tensor(x) else x for x in xs]

    reduce = partial(_reduced, call, divided_by)
    made = Made("all_reduce same", call, (divided_by,))
    return AdjointPair("all_reduce", "share", reduce, hand_over, made)


def _reduced(call: Call, by: int, xs: Sequence[Tensor]) -> list[Tensor]:
    if len(xs) == 1 and by == 1:  # most calls, without packing
        return [wire.all_reduce(call, xs[0])]
    x, by = divided_first(xs[0] if len(xs) == 1 else pack(xs), by)
    out = wire.all_reduce(call, x, scratch=x is not xs[0])
    return unpack_like(out if by == 1 else out.div_(by), xs)
