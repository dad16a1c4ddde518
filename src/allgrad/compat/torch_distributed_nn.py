"""The functions of ``torch.distributed.nn.functional``, each with its exact gradient.

A program changes its import line and keeps its calls::

    from torch.distributed.nn.functional import all_gather, reduce_scatter

becomes::

    from allgrad.compat.torch_distributed_nn import all_gather, reduce_scatter

``src`` and ``dst`` are global ranks and output arguments are filled, as in the original; ``group``
may also be any group that allgrad accepts. docs/migrating.md lists where the originals differ.

A result requires grad on every rank, so that every rank takes part in backward. ``grad="none"`` (or
``torch.no_grad()``) switches gradients off, and ``grad="same"`` keeps the own part only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import allgrad as ag
from allgrad._core import reductions
from allgrad._wire import handshake
from allgrad._wire import primitives as wire
from allgrad._wire.handshake import RankArgs, TensorSpec
from allgrad.collectives._inputs import check_for_all, exchange, take_leaves
from allgrad.collectives._mismatch import pieces_differ
from allgrad.collectives._size_exchange import held_pieces
from allgrad.collectives._sizes import divide
from allgrad.errors import GroupError, InputError, PieceMismatch, SizesError, TensorError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from allgrad._wire.calls import Call
    from allgrad.types import Grad, GroupLike

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]


def broadcast(tensor: Tensor, src: int, group: GroupLike = None, *, grad: Grad = "sum") -> Tensor:
    """The tensor of ``src``, on every rank."""
    root = _in_group("broadcast", group, src)[1]
    return ag.broadcast(tensor, root, group=group, grad=grad)


def reduce(tensor: Tensor, dst: int, op: Any = "sum", group: GroupLike = None) -> Tensor:
    """The reduction on ``dst``, zeros on the others."""
    return ag.reduce(tensor, _in_group("reduce", group, dst)[1], op, group=group)


def all_reduce(
    tensor: Tensor, op: Any = "sum", group: GroupLike = None, *, grad: Grad = "sum"
) -> Tensor:
    """The reduction on every rank."""
    return ag.all_reduce(tensor, op, group=group, grad=grad)


def all_gather(
    tensor: Tensor, group: GroupLike = None, *, grad: Grad = "sum"
) -> tuple[Tensor, ...]:
    """A tuple of every rank's tensor; lengths may differ along the first dimension."""
    call = wire.resolve("all_gather", group)
    sizes = _sizes("all_gather", call, tensor)
    return _split_pieces(ag.all_gather(tensor, sizes=sizes, group=group, grad=grad), sizes, tensor)


def gather(tensor: Tensor, dst: int = 0, group: GroupLike = None) -> tuple[Tensor, ...]:
    """On ``dst`` a tuple of every rank's tensor; on other ranks a tuple of zeros of the same sizes."""
    call, root = _in_group("gather", group, dst)
    sizes = _sizes("gather", call, tensor)
    joined = ag.gather(tensor, root, sizes=sizes, group=group)
    if call.rank != root:
        # The empty piece keeps the zeros in the graph, so that every rank takes part in backward.
        joined = torch.cat([joined, joined.new_zeros(sum(sizes), *joined.shape[1:])])
    return _split_pieces(joined, sizes, tensor)


def scatter(tensors: Sequence[Tensor] | None, src: int = 0, group: GroupLike = None) -> Tensor:
    """On rank ``r``, tensor ``r`` of the list that ``src`` holds.

    Other ranks pass None, or a list that is ignored and gets zero gradients.
    """
    call, root = _in_group("scatter", group, src)
    here = call.rank == root

    def check() -> Tensor | None:
        if tensors is None and not here:
            return None
        _check_list("scatter", "tensors", tensors, call.size if here else None, one_shape=here)
        assert tensors is not None
        if here:
            return torch.stack(tuple(tensors))
        # Joined, so that all of them have a gradient, of zero; as matrices, since torch cuts the graph behind
        # a cat of empty vectors.
        nothing = torch.cat([t.reshape(1, -1)[:, :0] for t in tensors])
        return nothing.reshape(0, *tensors[0].shape)

    whole = _agreed("scatter", call, tensors, check)
    piece: Tensor = ag.scatter(whole, root, group=group)
    return piece.squeeze(0)


def reduce_scatter(
    output: Tensor, input_list: Sequence[Tensor], op: Any = "sum", group: GroupLike = None
) -> Tensor:
    """Tensor ``r`` of the lists, reduced, on rank ``r``: returned, and written into ``output``."""
    call = wire.resolve("reduce_scatter", group)

    def check() -> None:
        _check_list("reduce_scatter", "input_list", input_list, call.size)
        _check_output("reduce_scatter", output, input_list[0], input_list[call.rank].numel())
        reductions.find("reduce_scatter", op, input_list[0].dtype)

    _agreed("reduce_scatter", call, input_list, check)
    one_shape = all(t.shape == input_list[0].shape for t in input_list)
    _require_same("reduce_scatter", call, input_list[0] if one_shape else list(input_list))
    flat = torch.cat([t.reshape(-1) for t in input_list])
    own = ag.reduce_scatter(flat, op=op, sizes=[t.numel() for t in input_list], group=group)
    return _fill([output.detach()], [own])[0]


def _all_gather_base(
    output_tensor: Tensor, input_tensor: Tensor, group: GroupLike = None, *, grad: Grad = "sum"
) -> Tensor:
    """The tensors of all ranks, joined: returned, and written into ``output_tensor``."""
    call = wire.resolve("all_gather", group)

    def check() -> None:
        _check_tensor("all_gather", "input_tensor", input_tensor)
        _check_output("all_gather", output_tensor, input_tensor, input_tensor.numel() * call.size)

    _agreed("all_gather", call, input_tensor, check)
    _require_same("all_gather", call, input_tensor)
    joined = ag.all_gather(input_tensor, sizes="equal", group=group, grad=grad)
    return _fill([output_tensor.detach()], [joined])[0]


def all_to_all(
    output_tensor_list: Sequence[Tensor],
    input_tensor_list: Sequence[Tensor],
    group: GroupLike = None,
) -> tuple[Tensor, ...]:
    """Send tensor ``r`` of the inputs to rank ``r``; the received tensors are written into the outputs.

    The outputs are returned and are part of the graph, as in the original; sizes may differ.
    """
    call = wire.resolve("all_to_all", group)

    def check() -> tuple[Tensor, list[int], list[int]]:
        _check_list("all_to_all", "input_tensor_list", input_tensor_list, call.size)
        _check_list("all_to_all", "output_tensor_list", output_tensor_list, call.size)
        _check_output("all_to_all", output_tensor_list[0], input_tensor_list[0])
        flat = torch.cat([t.reshape(-1) for t in input_tensor_list])
        return flat, [t.numel() for t in input_tensor_list], [t.numel() for t in output_tensor_list]

    flat, send, expected = _agreed("all_to_all", call, input_tensor_list, check)
    arrived = _exchange_blocks(call, group, flat, send, expected)
    return _fill(output_tensor_list, torch.unsafe_split_with_sizes(arrived, expected))


def all_to_all_single(
    output: Tensor,
    input: Tensor,  # noqa: A002
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: GroupLike = None,
) -> Tensor:
    """Send block ``r`` of ``input`` to rank ``r``; the received blocks are written into ``output``.

    Split sizes are along the first dimension; None or an empty list means equal blocks.
    """
    call = wire.resolve("all_to_all", group)

    def check() -> tuple[list[int], list[int]]:
        _check_tensor("all_to_all", "input", input)
        _check_output("all_to_all", output, input)
        return (
            _elements(call, input, input_split_sizes, "input_split_sizes"),
            _elements(call, output, output_split_sizes, "output_split_sizes"),
        )

    send, expected = _agreed("all_to_all", call, input, check)
    arrived = _exchange_blocks(call, group, input.reshape(-1), send, expected)
    return _fill([output.detach()], [arrived])[0]


def _in_group(op: str, group: GroupLike, global_rank: int) -> tuple[Call, int]:
    """The call, and the rank within its group of the process with this global rank."""
    call = wire.resolve(op, group)
    members = call.group.members if call.group.name else [0]
    if global_rank not in members:
        raise GroupError(
            f"{op}: global rank {global_rank!r} is not in the group.\n"
            f"Give the global rank of a member, one of {members}."
        )
    return call, members.index(global_rank)


class _Fill(torch.autograd.Function):
    """Writes results into memory of the caller, which becomes the result in the graph."""

    @staticmethod
    def forward(ctx: Any, outputs: Sequence[Tensor], *results: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG004
        for output, result in zip(outputs, results, strict=True):
            output.copy_(result)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ARG004
        return None, *gradients


def _fill(outputs: Sequence[Tensor], results: Sequence[Tensor]) -> tuple[Tensor, ...]:
    shaped = [result.view(o.shape) for o, result in zip(outputs, results, strict=True)]
    filled: tuple[Tensor, ...] = _Fill.apply(outputs, *shaped)  # type: ignore[no-untyped-call]
    return filled


def _split_pieces(joined: Tensor, sizes: Sequence[int], like: Tensor) -> tuple[Tensor, ...]:
    # Unlike views of one tensor, these can be changed in place (test_pieces_can_be_changed_in_place).
    pieces = torch.unsafe_split_with_sizes(joined, list(sizes))
    return tuple(piece if like.dim() else piece.reshape(()) for piece in pieces)


def _sizes(op: str, call: Call, tensor: Tensor) -> tuple[int, ...]:
    _agreed(op, call, tensor, lambda: _check_tensor(op, "tensor", tensor))
    return held_pieces(call, tensor, 0, None)[1].sizes[0]


def _agreed(op: str, call: Call, x: object, check: Callable[[], Any]) -> Any:
    """The result of the check. An error is sent to the ranks that wait in the next exchange."""
    return check_for_all(call, op, x, check, exchanged=call.size > 1)


def _require_same(op: str, call: Call, x: Tensor | list[Tensor]) -> None:
    leaves = take_leaves(op, x)
    rows = exchange(call, op, leaves, (0,) * len(leaves.tensors))
    if not rows.same():
        raise pieces_differ(call, leaves, rows.decoded(), free=False)


def _exchange_blocks(
    call: Call, group: GroupLike, flat: Tensor, send: Sequence[int], expected: Sequence[int]
) -> Tensor:
    """Exchange blocks of a flat tensor, after every rank has checked that all outputs fit."""
    leaves = take_leaves("all_to_all", flat)
    rows = exchange(call, "all_to_all", leaves, (0,), [send])
    amounts = rows.amounts()
    if amounts is None:
        raise pieces_differ(call, leaves, rows.decoded(), free=True)
    (arriving,) = amounts
    problem = None
    if arriving != tuple(expected):
        problem = SizesError(
            f"all_to_all: the output has room for {list(expected)} elements by rank, but "
            f"{list(arriving)} arrive.\n"
            "Give outputs, or output_split_sizes, as large as what is sent."
        )
    spec = TensorSpec(flat.dtype, tuple(flat.shape), 0)
    args = RankArgs("all_to_all", (spec,), problem=problem)
    handshake.exchange(call, args, flat.device).decoded()
    return ag.all_to_all(flat, send_sizes=send, recv_sizes=arriving, group=group)


def _elements(call: Call, x: Tensor, split: Sequence[int] | None, name: str) -> list[int]:
    """The number of elements of ``x`` for each rank."""
    rows = x.shape[0] if x.dim() else 1
    try:
        given = [] if split is None else list(split)
    except TypeError:
        raise SizesError(
            f"all_to_all: {name}={split!r}.\nGive None, or one size for each rank."
        ) from None
    if not given and rows % call.size:
        raise SizesError(
            f"all_to_all: {rows} rows do not divide by {call.size} ranks.\n"
            f"Give {name}, one size for each rank, or rows that divide."
        )
    sizes = divide("all_to_all", call, rows, given or "equal", name)
    return [size * (x.numel() // max(rows, 1)) for size in sizes]


def _check_tensor(op: str, name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise TensorError(f"{op}: {name} is {type(x).__name__}, not a tensor.\nGive a tensor.")
    take_leaves(op, x)


def _check_list(
    op: str, name: str, xs: object, length: int | None, *, one_shape: bool = False
) -> None:
    if not isinstance(xs, (list, tuple)) or not all(isinstance(x, Tensor) for x in xs):
        raise TensorError(f"{op}: {name} is not a list of tensors.\nGive one tensor for each rank.")
    take_leaves(op, list(xs))
    if not xs or len(xs) != (length or len(xs)):
        raise InputError(f"{op}: {name} has {len(xs)} tensors.\nGive one for each rank.")
    if any(x.dtype != xs[0].dtype for x in xs):
        raise PieceMismatch(f"{op}: {name} has several dtypes.\nCast them to one.")
    if one_shape and any(x.shape != xs[0].shape for x in xs):
        shapes = ", ".join(str(tuple(x.shape)) for x in xs)
        raise PieceMismatch(
            f"{op}: {name} has tensors of shapes {shapes}.\n"
            f"Give one shape to all, or join them and use allgrad.{op} with sizes."
        )


def _check_output(op: str, output: object, like: Tensor, elements: int | None = None) -> None:
    _check_tensor(op, "the output", output)
    assert isinstance(output, Tensor)
    if output.dtype != like.dtype:
        raise TensorError(
            f"{op}: the output is {output.dtype}, the input {like.dtype}.\nGive both one dtype."
        )
    if elements is not None and output.numel() != elements:
        raise SizesError(
            f"{op}: the output has shape {tuple(output.shape)}, but {elements} elements arrive.\n"
            "Give an output as large as the result."
        )
