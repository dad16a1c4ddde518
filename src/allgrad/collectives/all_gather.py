"""all_gather <-> reduce_scatter; with ``grad="same"``, all_gather <-> split."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from allgrad._autograd.adjoint_pair import AdjointPair, Made, makes_pair
from allgrad._autograd.transforms import apply
from allgrad._core import reductions
from allgrad._core.partition import Partition, divided_first, real_memory, unpack
from allgrad._wire import primitives as wire
from allgrad.collectives._inputs import (
    Leaves,
    check_for_all,
    check_grad,
    describe,
    has_only_shapes,
    named,
    run_known,
    take_leaves,
)
from allgrad.collectives._pair_cache import hashable, recall
from allgrad.collectives._size_exchange import await_others, compare_shapes, held_pieces
from allgrad.collectives._sizes import partition_for
from allgrad.collectives.all_to_all import exchange_pair

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from allgrad._autograd.adjoint_pair import Ends
    from allgrad._wire.calls import Call
    from allgrad.types import Grad, GroupLike, Handle, Nest, Op, Sizes, SumOrNone

__all__ = [
    "all_gather",
    "gather_pair",
    "gather_sizes",
    "reduce_pieces",
    "reduce_scatter",
    "same_pair",
    "split",
]


@overload
def all_gather(
    x: Nest,
    dim: int = ...,
    *,
    sizes: Sizes = ...,
    group: GroupLike = ...,
    grad: Grad = ...,
    async_op: Literal[False] = ...,
) -> Nest: ...
@overload
def all_gather(
    x: Nest,
    dim: int = ...,
    *,
    sizes: Sizes = ...,
    group: GroupLike = ...,
    grad: Grad = ...,
    async_op: Literal[True],
) -> Handle[Nest]: ...
def all_gather(
    x: Any,
    dim: int = 0,
    *,
    sizes: Sizes = None,
    group: GroupLike = None,
    grad: Grad = "sum",
    async_op: bool = False,
) -> Any:
    """Give every rank all pieces, joined along ``dim`` in rank order.

        rank 0   [ a a ]              [ a a | b | c c c ]
        rank 1   [ b ]       --->     [ a a | b | c c c ]
        rank 2   [ c c c ]            [ a a | b | c c c ]

    Gradient: ``reduce_scatter`` with the same sizes. A piece was used on every rank, so its
    gradient is the sum of what every rank sends back.

        rank 0   A0 + A1 + A2         [ A0 | B0 | C0 ]
        rank 1   B0 + B1 + B2  <---   [ A1 | B1 | C1 ]
        rank 2   C0 + C1 + C2         [ A2 | B2 | C2 ]

    ``grad="same"`` keeps a rank's own part of its own gradient (A0, B1, C2), for when every rank
    does the same work with the result. A tensor without dimensions counts as a vector of one.

    Cost: one collective each way, plus one size exchange unless ``sizes`` is given.
    """
    key = None if sizes is None else ("all_gather", x, group, dim, hashable(sizes), grad)
    known = recall(*key) if key is not None and type(dim) is int else None
    if known is not None:
        return run_known(known, x, grad, async_op)
    return _checked_all_gather(x, dim, sizes, group, grad, async_op, key)


def _checked_all_gather(  # noqa: PLR0917
    x: Any,
    dim: int,
    sizes: Sizes,
    group: GroupLike,
    grad: Grad,
    async_op: bool,
    key: tuple[Any, ...] | None,
) -> Any:
    """A call like no call before. Apart, so that a call from the cache makes no closures."""
    call = wire.resolve("all_gather", group, lambda: describe(x, dim, dim=dim, grad=grad))
    stop = check_grad(call, grad, same=True)
    leaves, partition = held_pieces(call, x, dim, sizes)
    call = named(call, leaves)
    make_pair = same_pair if grad == "same" else gather_pair
    return leaves.run_parts(
        partition, lambda part: make_pair(call, part), stop=stop, async_op=async_op, key=key
    )


@overload
def reduce_scatter(
    x: Nest,
    dim: int = ...,
    op: Op = ...,
    *,
    sizes: Sizes = ...,
    group: GroupLike = ...,
    grad: SumOrNone = ...,
    async_op: Literal[False] = ...,
) -> Nest: ...
@overload
def reduce_scatter(
    x: Nest,
    dim: int = ...,
    op: Op = ...,
    *,
    sizes: Sizes = ...,
    group: GroupLike = ...,
    grad: SumOrNone = ...,
    async_op: Literal[True],
) -> Handle[Nest]: ...
def reduce_scatter(
    x: Any,
    dim: int = 0,
    op: Op = "sum",
    *,
    sizes: Sizes = None,
    group: GroupLike = None,
    grad: SumOrNone = "sum",
    async_op: bool = False,
) -> Any:
    """Reduce over ranks, and give each rank its own piece of the result.

        rank 0   [ a0 a0 | b0 | c0 ]         [ a0+a1+a2  a0+a1+a2 ]
        rank 1   [ a1 a1 | b1 | c1 ]   --->  [ b0+b1+b2 ]
        rank 2   [ a2 a2 | b2 | c2 ]         [ c0+c1+c2 ]

    Gradient of a sum: ``all_gather`` with the same sizes. Of ``min``, ``max``, ``prod`` and
    ``logsumexp``: torch's own over the stacked pieces, sent back to whose they are.

        rank 0   [ A A | B | C ]         [ A A ]
        rank 1   [ A A | B | C ]   <---  [ B ]
        rank 2   [ A A | B | C ]         [ C ]

    ``sizes=None`` cuts as evenly as possible, the first ranks getting one more.

    Cost: one collective each way, plus one exchange of shapes unless ``sizes`` is given.
    """
    key = None if sizes is None else ("reduce_scatter", x, group, dim, op, hashable(sizes), grad)
    known = recall(*key) if key is not None and type(dim) is int else None
    if known is not None:
        return run_known(known, x, grad, async_op)
    call = wire.resolve("reduce_scatter", group, lambda: describe(x, dim=dim, op=op))
    stop = check_grad(call, grad)
    compared = sizes is None and call.size > 1

    def check() -> tuple[Leaves, Partition, list[reductions.Reduction]]:
        leaves, dims = take_leaves("reduce_scatter", x).along("reduce_scatter", dim)
        found = [reductions.find("reduce_scatter", op, t.dtype) for t in leaves.tensors]
        return leaves, partition_for(call, leaves, dims, sizes), found

    leaves, partition, found = check_for_all(call, "reduce_scatter", x, check, exchanged=compared)
    if not compared:
        await_others(call, leaves)
    elif not has_only_shapes(leaves):
        compare_shapes(call, "reduce_scatter", leaves, partition.dims)
    call = named(call, leaves)
    if any(not reduction.linear for reduction in found):
        return leaves.call_each(
            lambda numbers, xs: reduce_pieces(
                call, found[numbers[0]], xs, partition.select(numbers), stop=stop
            ),
            async_op=async_op,
        )

    def make_pair(numbers: list[int]) -> AdjointPair:
        divided_by = 1 if found[numbers[0]].name == "sum" else call.size
        return gather_pair(call, partition.select(numbers), divided_by).adjoint

    return leaves.run(make_pair, stop=stop, async_op=async_op, key=key)


def reduce_pieces(
    call: Call,
    reduction: reductions.Reduction,
    xs: Sequence[Tensor],
    partition: Partition,
    *,
    stop: bool = False,
) -> list[Tensor]:
    """Exchange the pieces, reduce them, and keep the own block; the arguments are known to be good."""
    own = [sizes[call.rank] for sizes in partition.sizes]
    incoming = Partition(partition.dims, tuple((size,) * call.size for size in own))
    exchanged = apply(exchange_pair(call, partition, incoming), xs, stop=stop)
    return [
        reduction.stacked(x.unflatten(dim, (call.size, size)), dim)
        for x, dim, size in zip(exchanged, partition.dims, own, strict=True)
    ]


@overload
def split(
    x: Nest,
    dim: int = ...,
    *,
    sizes: Sizes = ...,
    group: GroupLike = ...,
    grad: SumOrNone = ...,
    async_op: Literal[False] = ...,
) -> Nest: ...
@overload
def split(
    x: Nest,
    dim: int = ...,
    *,
    sizes: Sizes = ...,
    group: GroupLike = ...,
    grad: SumOrNone = ...,
    async_op: Literal[True],
) -> Handle[Nest]: ...
def split(
    x: Any,
    dim: int = 0,
    *,
    sizes: Sizes = None,
    group: GroupLike = None,
    grad: SumOrNone = "sum",
    async_op: bool = False,
) -> Any:
    """Keep the own piece of a value that all ranks hold.

        rank 0   [ a a | b | c ]         [ a a ]
        rank 1   [ a a | b | c ]   --->  [ b ]
        rank 2   [ a a | b | c ]         [ c ]

    Gradient: ``all_gather``. Together the ranks used the whole value once, so every rank gets
    the whole gradient.

        rank 0   [ A A | B | C ]         [ A A ]
        rank 1   [ A A | B | C ]   <---  [ B ]
        rank 2   [ A A | B | C ]         [ C ]

    ``sizes=None`` cuts as evenly as possible, the first ranks getting one more.

    Cost: nothing forward, one collective backward.
    """
    call = wire.resolve("split", group, lambda: describe(x, dim=dim))
    stop = check_grad("split", grad)
    leaves, dims = take_leaves("split", x).along("split", dim)
    partition = partition_for(call, leaves, dims, sizes)
    call = named(call, leaves)
    return leaves.run_parts(
        partition,
        lambda part: same_pair(call, part).adjoint,
        stop=stop,
        async_op=async_op,
    )


@overload
def gather_sizes(x: Tensor, dim: int = ..., *, group: GroupLike = ...) -> tuple[int, ...]: ...
@overload
def gather_sizes(x: object, dim: int = ..., *, group: GroupLike = ...) -> Any: ...
def gather_sizes(x: object, dim: int = 0, *, group: GroupLike = None) -> Any:
    """Give every rank what each rank holds along ``dim``, in rank order.

        rank 0   [ a a ]              (2, 1, 3)
        rank 1   [ b ]       --->     (2, 1, 3)
        rank 2   [ c c c ]            (2, 1, 3)

    For a nest, the nest of such tuples.

    Cost: one size exchange. Pass the result as ``sizes=`` to save it in later calls.
    """
    call = wire.resolve("gather_sizes", group, lambda: describe(x, dim, dim=dim))
    leaves, partition = held_pieces(call, x, dim, None)
    return leaves.put_back(partition.sizes)


def _ends(call: Call, partition: Partition, *_: int) -> Ends:
    return partition.lengths(call.rank), partition.totals()


@makes_pair("all_gather", _ends)
def gather_pair(call: Call, partition: Partition, divided_by: int = 1) -> AdjointPair:
    """all_gather <-> reduce_scatter, both divided by a number where a mean is meant."""
    rows = partition.sizes[0] if partition.dims == (0,) else None

    def gather(xs: Sequence[Tensor]) -> list[Tensor]:
        if rows is not None:  # a single tensor travels as it is
            return [_divided(wire.all_gather(call, xs[0], rows), divided_by)]
        out = wire.all_gather(call, partition.pack_own(xs), partition.counts(xs))
        return partition.join(_divided(out, divided_by), xs)

    def reduce_and_keep(xs: Sequence[Tensor]) -> list[Tensor]:
        if rows is not None:
            x, by = divided_first(xs[0], divided_by)
            return [_divided(wire.reduce_scatter(call, x, rows), by)]
        x, by = divided_first(partition.pack_blocks(xs), divided_by)
        out = wire.reduce_scatter(call, x, partition.counts(xs))
        return unpack(_divided(out, by), partition.shapes(xs, call.rank))

    made = Made("all_gather", call, (partition, divided_by))
    return AdjointPair("all_gather", "reduce_scatter", gather, reduce_and_keep, made)


@makes_pair("all_gather same", _ends)
def same_pair(call: Call, partition: Partition) -> AdjointPair:
    """all_gather <-> split: pieces on one side, on the other a joined value that all ranks use alike."""

    def keep(xs: Sequence[Tensor]) -> list[Tensor]:
        own = partition.own_blocks(xs, call.rank)
        return [x.clone() if x.is_contiguous() else real_memory(x) for x in own]

    made = Made("all_gather same", call, (partition,))
    return AdjointPair("all_gather", "split", gather_pair(call, partition).forward, keep, made)


def _divided(fresh: Tensor, by: int) -> Tensor:
    return fresh if by == 1 else fresh.div_(by)
