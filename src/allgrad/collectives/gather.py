"""gather <-> scatter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from allgrad._autograd.adjoint_pair import AdjointPair, Made, makes_pair
from allgrad._core.partition import Partition, unpack
from allgrad._core.torch_internals import lengths_differ
from allgrad._wire import primitives as wire
from allgrad.collectives._inputs import (
    Leaves,
    arguments_in_words,
    check_for_all,
    check_grad,
    check_rank,
    describe,
    has_only_shapes,
    named,
    run_known,
    take_leaves,
)
from allgrad.collectives._pair_cache import hashable, recall
from allgrad.collectives._size_exchange import amounts_of_src, held_pieces, told_by_src
from allgrad.collectives._sizes import given_sizes, partition_for, reusable
from allgrad.errors import ModeError, SizesError, TensorError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from allgrad._autograd.adjoint_pair import Ends
    from allgrad._wire.calls import Call
    from allgrad._wire.handshake import RankArgs
    from allgrad.types import GroupLike, Handle, Nest, Sizes, SumOrNone

__all__ = ["gather", "gather_pair", "scatter"]


@overload
def gather(
    x: Nest,
    dst: int = ...,
    dim: int = ...,
    *,
    sizes: Sizes = ...,
    group: GroupLike = ...,
    grad: SumOrNone = ...,
    async_op: Literal[False] = ...,
) -> Nest: ...
@overload
def gather(
    x: Nest,
    dst: int = ...,
    dim: int = ...,
    *,
    sizes: Sizes = ...,
    group: GroupLike = ...,
    grad: SumOrNone = ...,
    async_op: Literal[True],
) -> Handle[Nest]: ...
def gather(
    x: Any,
    dst: int = 0,
    dim: int = 0,
    *,
    sizes: Sizes = None,
    group: GroupLike = None,
    grad: SumOrNone = "sum",
    async_op: bool = False,
) -> Any:
    """Give ``dst`` all pieces, joined along ``dim`` in rank order; the others get an empty piece.

        rank 0   [ a a ]              [ a a | b | c c c ]
        rank 1   [ b ]       --->     [ ]
        rank 2   [ c c c ]            [ ]

    Gradient: ``scatter`` from ``dst`` with the same sizes.

        rank 0   [ A A ]              [ A A | B | C C C ]
        rank 1   [ B ]       <---     [ ]
        rank 2   [ C C C ]            [ ]

    Use the result on every rank, if only by adding its sum to the loss: backward needs every rank.

    Cost: one collective each way, plus one size exchange unless ``sizes`` is given.
    """
    key = None
    if sizes is not None:
        key = ("gather", x, group, dst, dim, hashable(sizes), grad)
        known = recall(*key) if type(dst) is int and type(dim) is int else None
        if known is not None:
            return run_known(known, x, grad, async_op)
    call = wire.resolve("gather", group, lambda: describe(x, dim, dst=dst, dim=dim))
    stop = check_grad(call, grad)
    root = check_rank("gather", call, "dst", dst)
    leaves, partition = held_pieces(call, x, dim, sizes, root=root)
    call = named(call, leaves)
    return leaves.run_parts(
        partition,
        lambda part: gather_pair(call, part, root),
        stop=stop,
        async_op=async_op,
        key=key,
    )


@overload
def scatter(
    x: Tensor | None,
    src: int = ...,
    dim: int = ...,
    *,
    sizes: Sizes = ...,
    group: GroupLike = ...,
    grad: SumOrNone = ...,
    async_op: Literal[False] = ...,
) -> Tensor: ...
@overload
def scatter(
    x: Tensor | None,
    src: int = ...,
    dim: int = ...,
    *,
    sizes: Sizes = ...,
    group: GroupLike = ...,
    grad: SumOrNone = ...,
    async_op: Literal[True],
) -> Handle[Tensor]: ...
@overload
def scatter(
    x: Nest,
    src: int = ...,
    dim: int = ...,
    *,
    sizes: Sizes = ...,
    group: GroupLike = ...,
    grad: SumOrNone = ...,
    async_op: Literal[False] = ...,
) -> Nest: ...
@overload
def scatter(
    x: Nest,
    src: int = ...,
    dim: int = ...,
    *,
    sizes: Sizes = ...,
    group: GroupLike = ...,
    grad: SumOrNone = ...,
    async_op: Literal[True],
) -> Handle[Nest]: ...
def scatter(
    x: Any,
    src: int = 0,
    dim: int = 0,
    *,
    sizes: Sizes = None,
    group: GroupLike = None,
    grad: SumOrNone = "sum",
    async_op: bool = False,
) -> Any:
    """Cut what ``src`` holds along ``dim``, and give each rank its piece.

        rank 0   [ a a | b | c c c ]         [ a a ]
        rank 1   None                  --->  [ b ]
        rank 2   None                        [ c c c ]

    Gradient: ``gather`` to ``src`` with the same sizes.

        rank 0   [ A A | B | C C C ]         [ A A ]
        rank 1   -                     <---  [ B ]
        rank 2   -                           [ C C C ]

    ``sizes`` are read on ``src``; ``None`` divides as evenly as possible. Off ``src`` any tensor may
    stand for None; it is ignored, as in ``broadcast``, and its gradient is zero. When ``src`` cuts
    a nest, the others pass a nest of the same structure. Under ``torch.compile`` those off ``src``
    pass a tensor with the dtype and the other dimensions of the one on ``src``.

    Cost: one collective each way, and one exchange in which ``src`` tells shape and dtype.
    """
    call = wire.resolve("scatter", group, lambda: arguments_in_words(src=src, dim=dim))
    stop = check_grad(call, grad)
    root = check_rank("scatter", call, "src", src)
    here = call.rank == root
    sizes = reusable(sizes)

    def check() -> tuple[Leaves, Partition]:
        if here and x is None:
            raise TensorError("scatter: x is None on src.\nGive src the tensor to cut.")
        leaves = Leaves([], None) if x is None else take_leaves("scatter", x)
        if not here:
            leaves, dims = leaves.along("scatter", 0)
            return leaves, Partition(dims, ((0,) * call.size,) * len(dims))
        leaves, dims = leaves.along("scatter", dim)
        return leaves, partition_for(call, leaves, dims, sizes)

    leaves, partition = check_for_all(call, "scatter", x, check, exchanged=call.size > 1)
    known = _is_known(leaves, sizes)
    if call.size == 1:
        pass
    elif torch.compiler.is_compiling() or (has_only_shapes(leaves) and known):
        given = given_sizes("scatter", call, sizes)[call.rank] if known else None
        leaves, partition = _in_graph(call, leaves, partition, root, dim, given)
    else:
        told, own = told_by_src(call, leaves, partition.dims, partition.sizes, root)
        if not here:
            leaves = _ignored(call, leaves, told)
            partition = Partition(
                tuple(spec.dim for spec in told.tensors),
                tuple(_only(call.rank, call.size, amount) for amount in own),
            )
    return leaves.run_parts(
        partition,
        lambda part: gather_pair(call, part, root).adjoint,
        stop=stop,
        async_op=async_op,
    )


def _is_known(leaves: Leaves, sizes: Sizes) -> bool:
    """Tell whether every rank knows what it gets without a message from src."""
    return sizes is not None and not isinstance(sizes, str) and len(leaves.tensors) > 0


def _only(rank: int, ranks: int, amount: int) -> tuple[int, ...]:
    return tuple(amount if other == rank else 0 for other in range(ranks))


def _in_graph(  # noqa: PLR0917
    call: Call, leaves: Leaves, partition: Partition, src: int, dim: object, given: int | None
) -> tuple[Leaves, Partition]:
    """What a rank passes and gets, in a graph or by shapes alone: its dtypes and other dimensions
    are those of what it was given.
    """
    if not leaves.tensors:
        raise ModeError(
            "scatter: under torch.compile x is a tensor on every rank.\n"
            "Give a tensor with the dtype and the other dimensions of the one on src."
        )
    amounts: list[int] = []
    if torch.compiler.is_compiling():
        amounts = amounts_of_src(call, leaves, partition, src)
    if call.rank == src:
        return leaves, partition
    if given is not None:
        if any(lengths_differ(amount, given) for amount in amounts):
            raise SizesError("scatter: sizes= differ from src's.\nGive every rank the same sizes.")
        amounts = [given] * len(leaves.tensors)
    leaves, dims = leaves.along("scatter", dim)
    empty = [t.narrow(d, 0, 0) for t, d in zip(leaves.tensors, dims, strict=True)]
    sizes = tuple(_only(call.rank, call.size, amount) for amount in amounts)
    return Leaves(empty, leaves.frame), Partition(dims, sizes)


def _ignored(call: Call, leaves: Leaves, told: RankArgs) -> Leaves:
    """Empty tensors for what a rank off src passed, linked to it: its gradient is zero.

    They are on the type of device that src's are on: a group may carry several.
    """
    specs = told.tensors
    shapes = [[*s.shape[: s.dim], 0, *s.shape[s.dim + 1 :]] for s in specs]
    if len(leaves.tensors) == len(specs):
        given = zip(leaves.tensors, shapes, specs, strict=True)
        return Leaves(
            [_empty_like(t, told.device, s.dtype).reshape(shape) for t, shape, s in given],
            leaves.frame,
        )
    device = call.group.message_device(torch.get_default_device())
    if call.group.carries(told.device):
        device = torch.device(told.device)
    fresh = [
        torch.empty(shape, dtype=s.dtype, device=device)
        for shape, s in zip(shapes, specs, strict=True)
    ]
    return Leaves(fresh, None)


def _empty_like(x: Tensor, device: str, dtype: torch.dtype | None) -> Tensor:
    """No elements of ``x``, moved if src's tensors are on another type of device."""
    # By its length: in an empty batch of torch.vmap, -1 could be anything.
    nothing = x.reshape(x.numel())[:0].to(dtype)
    return nothing if device in {"", x.device.type} else nothing.to(device)


def _ends(call: Call, partition: Partition, root: int) -> Ends:
    joined = partition.totals() if call.rank == root else [0] * len(partition.dims)
    return partition.lengths(call.rank), joined


@makes_pair("gather", _ends)
def gather_pair(call: Call, partition: Partition, root: int) -> AdjointPair:
    """Gather <-> scatter. Off ``root`` only the own sizes are used."""
    here = call.rank == root

    everyone = range(call.size) if here else ()

    def counts(xs: Sequence[Tensor]) -> tuple[Sequence[int], Sequence[int]]:
        """What each rank's side sends, and what the root's side receives."""
        by_rank = partition.counts(xs)
        out = [by_rank[call.rank] if rank == root else 0 for rank in range(call.size)]
        return out, by_rank if here else [0] * call.size

    def collect(xs: Sequence[Tensor]) -> list[Tensor]:
        out, into = counts(xs)
        packed = wire.all_to_all(call, partition.pack_own(xs), out, into, peers=((root,), everyone))
        return partition.join(packed, xs) if here else unpack(packed, partition.empty_shapes(xs))

    def deal(xs: Sequence[Tensor]) -> list[Tensor]:
        out, into = counts(xs)
        packed = partition.pack_blocks(xs) if here else partition.pack_none(xs)
        received = wire.all_to_all(call, packed, into, out, peers=(everyone, (root,)))
        return unpack(received, partition.shapes(xs, call.rank))

    return AdjointPair("gather", "scatter", collect, deal, Made("gather", call, (partition, root)))
