"""all_to_all: its own adjoint, with what is sent and what is received swapped."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

from allgrad._autograd.adjoint_pair import AdjointPair, Made, makes_pair
from allgrad._autograd.async_calls import Handle
from allgrad._core.partition import Partition
from allgrad._wire import primitives as wire
from allgrad.collectives._inputs import (
    Leaves,
    check_for_all,
    check_grad,
    describe,
    named,
    run_known,
    take_leaves,
)
from allgrad.collectives._pair_cache import hashable, recall
from allgrad.collectives._size_exchange import arriving_sizes, await_others
from allgrad.collectives._sizes import given_sizes, partition_for, reusable
from allgrad.errors import SizesError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from allgrad._wire.calls import Call
    from allgrad.types import GroupLike, Nest, Sizes, SumOrNone

__all__ = ["all_to_all", "exchange_pair"]


@overload
def all_to_all(
    x: Nest,
    dim: int = ...,
    *,
    send_sizes: Sizes = ...,
    recv_sizes: Sizes = ...,
    return_sizes: Literal[False] = ...,
    group: GroupLike = ...,
    grad: SumOrNone = ...,
    async_op: Literal[False] = ...,
) -> Nest: ...
@overload
def all_to_all(
    x: Nest,
    dim: int = ...,
    *,
    send_sizes: Sizes = ...,
    recv_sizes: Sizes = ...,
    return_sizes: Literal[False] = ...,
    group: GroupLike = ...,
    grad: SumOrNone = ...,
    async_op: Literal[True],
) -> Handle[Nest]: ...
@overload
def all_to_all(
    x: Nest,
    dim: int = ...,
    *,
    send_sizes: Sizes = ...,
    recv_sizes: Sizes = ...,
    return_sizes: Literal[True],
    group: GroupLike = ...,
    grad: SumOrNone = ...,
    async_op: Literal[False] = ...,
) -> tuple[Nest, Any]: ...
@overload
def all_to_all(
    x: Nest,
    dim: int = ...,
    *,
    send_sizes: Sizes = ...,
    recv_sizes: Sizes = ...,
    return_sizes: Literal[True],
    group: GroupLike = ...,
    grad: SumOrNone = ...,
    async_op: Literal[True],
) -> Handle[tuple[Nest, Any]]: ...
def all_to_all(
    x: Any,
    dim: int = 0,
    *,
    send_sizes: Sizes = None,
    recv_sizes: Sizes = None,
    return_sizes: bool = False,
    group: GroupLike = None,
    grad: SumOrNone = "sum",
    async_op: bool = False,
) -> Any:
    """Send block ``r`` of ``x`` to rank ``r``; join what arrives in rank order.

        rank 0   [ a0 | a1 a1 | a2 ]         [ a0 | b0 b0 | c0 ]
        rank 1   [ b0 b0 | b1 | b2 ]   --->  [ a1 a1 | b1 | c1 ]
        rank 2   [ c0 | c1 | c2 c2 ]         [ a2 | b2 | c2 c2 ]

    Gradient: ``all_to_all`` the other way, each block back to where it came from.

    ``send_sizes=None`` cuts as evenly as possible, the first ranks getting one more;
    ``recv_sizes=None`` finds out what arrives. ``send_sizes="equal"`` promises that all blocks
    between all ranks have one size.

    ``return_sizes=True`` gives ``(result, sizes)``: what each rank sent to this one, a nest of such
    tuples for a nest. The way back of a dispatch then needs no size exchange of its own:
    ``all_to_all(y, send_sizes=sizes, recv_sizes=sent)``.

    Cost: one collective each way, plus one size exchange unless ``recv_sizes`` is given.
    """
    if isinstance(send_sizes, str) and recv_sizes is None:
        recv_sizes = send_sizes
    equal = isinstance(send_sizes, str) and isinstance(recv_sizes, str)
    sizes = (send_sizes, recv_sizes) if equal else (hashable(send_sizes), hashable(recv_sizes))
    key = None if recv_sizes is None else ("all_to_all", x, group, dim, *sizes, grad)
    lookup = not return_sizes and type(dim) is int
    known = recall(*key) if lookup and key is not None else None
    if known is not None:
        return run_known(known, x, grad, async_op)
    return _checked_all_to_all(
        x, dim, send_sizes, recv_sizes, return_sizes, group, grad, async_op, key
    )


def _checked_all_to_all(  # noqa: PLR0917
    x: Any,
    dim: int,
    send_sizes: Sizes,
    recv_sizes: Sizes,
    return_sizes: bool,
    group: GroupLike,
    grad: SumOrNone,
    async_op: bool,
    key: tuple[Any, ...] | None,
) -> Any:
    """A call like no call before. Apart, so that a call from the cache makes no closures."""
    equal = isinstance(send_sizes, str) and isinstance(recv_sizes, str)
    call = wire.resolve("all_to_all", group, lambda: describe(x, dim, dim=dim))
    stop = check_grad(call, grad)

    def check() -> tuple[Leaves, Partition, Partition | None]:
        leaves, dims = take_leaves("all_to_all", x).along("all_to_all", dim)
        send = partition_for(call, leaves, dims, send_sizes, "send_sizes")
        if recv_sizes is None:
            return leaves, send, send if call.size == 1 else None
        if isinstance(recv_sizes, str) and recv_sizes == "equal":
            receive = tuple((sizes[call.rank],) * call.size for sizes in send.sizes)
        else:
            given = given_sizes("all_to_all", call, reusable(recv_sizes), "recv_sizes")
            receive = (given,) * len(dims)
        for sent, got in zip(send.sizes, receive, strict=True):
            if sent[call.rank] != got[call.rank]:
                raise SizesError(
                    f"all_to_all: rank {call.rank} keeps {sent[call.rank]} by send_sizes and "
                    f"{got[call.rank]} by recv_sizes.\nGive the same number in both for the rank itself."
                )
        return leaves, send, Partition(dims, receive)

    find_out = recv_sizes is None and call.size > 1
    leaves, send, received = check_for_all(call, "all_to_all", x, check, exchanged=find_out)
    if not find_out:
        await_others(call, leaves)
    if received is None:
        received = Partition(send.dims, arriving_sizes(call, leaves, send))
    receive = received
    call = named(call, leaves)
    result = leaves.run(
        lambda numbers: exchange_pair(call, send.select(numbers), receive.select(numbers), equal),
        stop=stop,
        async_op=async_op,
        key=key,
    )
    if not return_sizes:
        return result
    sizes = leaves.put_back(receive.sizes)
    return Handle(lambda: (result.wait(), sizes)) if async_op else (result, sizes)


@makes_pair("all_to_all", lambda _, send, receive, *__: (send.totals(), receive.totals()))
def exchange_pair(
    call: Call, send: Partition, receive: Partition, equal: bool = False
) -> AdjointPair:
    """Blocks of ``send`` sizes out, blocks of ``receive`` sizes in; swapped in the adjoint.

    ``equal`` promises that all blocks between all ranks have one size.
    """
    return AdjointPair(
        "all_to_all",
        "all_to_all",
        partial(_exchange, call, send, receive, bool(equal)),
        partial(_exchange, call, receive, send, bool(equal)),
        Made("all_to_all", call, (send, receive, equal)),
    )


_ROWS = (0,)


def _exchange(
    call: Call, send: Partition, receive: Partition, equal: bool, xs: Sequence[Tensor]
) -> list[Tensor]:
    if send.dims == _ROWS:  # a single tensor travels as it is
        return [wire.all_to_all(call, xs[0], send.sizes[0], receive.sizes[0], equal)]
    counts = send.counts(xs), receive.counts(xs)
    return receive.join(wire.all_to_all(call, send.pack_blocks(xs), *counts, equal), xs)
