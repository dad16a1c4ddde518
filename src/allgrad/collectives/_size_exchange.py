"""What the ranks find out from each other before a call, in eager code and as an op in a graph.

Collectives call the functions of the first part. In eager code they make the exchange; in a
graph they leave it to the op ``exchange`` (graph_ops), which makes the same one when the graph runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from allgrad._autograd.adjoint_pair import HANDSHAKE
from allgrad._autograd.transforms import has_only_shape
from allgrad._core.partition import Partition
from allgrad._core.torch_internals import FINDS_LENGTHS_IN_TRANSFORMS, functorch_active, unrecorded
from allgrad._wire.calls import Call
from allgrad.collectives._inputs import Leaves, check_for_all, exchange, take_leaves
from allgrad.collectives._mismatch import pieces_differ
from allgrad.collectives._sizes import held_sizes, reusable
from allgrad.errors import ModeError, TensorError, rank_table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from allgrad._wire.handshake import RankArgs
    from allgrad.types import Sizes

    SizesByTensor = Sequence[Sequence[int]]

__all__ = [
    "amounts_of_src",
    "arriving_sizes",
    "await_others",
    "compare_shapes",
    "held_pieces",
    "told_by_src",
]


def held_pieces(  # noqa: PLR0917
    call: Call, x: object, dim: object, sizes: Sizes, operation: str | None = None, root: int = -1
) -> tuple[Leaves, Partition]:
    """Check the pieces of a ragged whole, and find what each rank holds of it.

    With ``sizes=None`` a mistake on one rank is told to all of them in the size exchange, which also
    compares ``root``: the dst, or a number for where every rank sends to.
    """
    operation = operation or call.name
    find_out = sizes is None and call.size > 1

    def check() -> tuple[Leaves, Partition]:
        leaves, dims = take_leaves(call.name, x).along(call.name, dim)
        if find_out:
            return leaves, Partition(dims, ())
        known = "equal" if sizes is None else reusable(sizes)
        own = [t.shape[d] for t, d in zip(leaves.tensors, dims, strict=True)]
        return leaves, Partition(dims, tuple(held_sizes(call, n, known) for n in own))

    leaves, known = check_for_all(call, operation, x, check, exchanged=find_out)
    if not find_out:
        await_others(call, leaves)
        return leaves, known
    return leaves, Partition(known.dims, _sizes_by_rank(call, operation, leaves, known.dims, root))


def await_others(call: Call, leaves: Leaves) -> None:
    """Exchange structures where a nest has no tensors, and no sizes are exchanged: nothing would be sent.

    A rank whose nest is empty by mistake would go on, and its next calls meet those that the others
    are in (test_an_empty_nest_on_one_rank). Where all nests are empty the exchange is all that is sent.
    """
    if leaves.tensors or call.size == 1 or has_only_shape(torch.empty(0, device="cpu")):
        return
    compare_shapes(Call(*call[:-1], "a nest without tensors"), call.name, leaves, ())


def _sizes_by_rank(
    call: Call, operation: str, leaves: Leaves, dims: Sequence[int], root: int
) -> tuple[tuple[int, ...], ...]:
    """What every rank holds of each leaf along its dim."""
    if not torch.compiler.is_compiling():
        return _lengths(call, operation, leaves, dims, (), root)
    found = _in_graph(call, operation, leaves, dims, outputs=len(dims) * call.size, root=root)
    own = [t.shape[dim] for t, dim in zip(leaves.tensors, dims, strict=True)]
    return _with_known(call, found, own)


def arriving_sizes(call: Call, leaves: Leaves, send: Partition) -> tuple[tuple[int, ...], ...]:
    """What every rank sends to this one of each leaf, in all_to_all."""
    if not torch.compiler.is_compiling():
        return _amounts(call, "all_to_all", leaves, send.dims, send.sizes)
    outputs = len(send.dims) * call.size
    found = _in_graph(call, "all_to_all", leaves, send.dims, outputs=outputs, amounts=send.sizes)
    return _with_known(call, found, [sizes[call.rank] for sizes in send.sizes])


def compare_shapes(call: Call, operation: str, leaves: Leaves, dims: Sequence[int]) -> None:
    """Raise on every rank unless all have one shape."""
    if torch.compiler.is_compiling():
        _in_graph(call, operation, leaves, dims, outputs=0)
    else:
        _same_shapes(call, operation, leaves, dims)


def amounts_of_src(call: Call, leaves: Leaves, partition: Partition, src: int) -> list[int]:
    """What this rank gets of each leaf that src cuts, in a graph."""
    dims, sizes = partition.dims, partition.sizes
    return _in_graph(call, "scatter", leaves, dims, outputs=len(dims), amounts=sizes, root=src)


@unrecorded
def told_by_src(
    call: Call, leaves: Leaves, dims: Sequence[int], amounts: SizesByTensor, src: int
) -> tuple[RankArgs, tuple[int, ...]]:
    """What src told, and what this rank gets of what it cuts, once every rank agrees that it is src.

    Other ranks' tensors are ignored.
    """
    rows = exchange(call, "scatter", leaves, dims, amounts, src)
    told = rows.told_by(src)
    if told is None or told.root != src:
        ranks = rows.decoded()
        if any(args.operation != "scatter" or args.root != src for args in ranks):
            raise pieces_differ(call, leaves, ranks, free=True)
        told = _with_structure(ranks, src)
    if told.amounts is None:
        following = rows.following_amounts(len(told.tensors))
        return told, tuple(by_rank[src] for by_rank in following)
    return told, told.amounts[call.rank :: call.size]


def _with_structure(ranks: Sequence[RankArgs], src: int) -> RankArgs:
    cut = ranks[src]
    if cut.names:
        odd = {
            rank: "passed none" if not args.tensors else "another structure"
            for rank, args in enumerate(ranks)
            if (len(args.tensors), args.names) != (len(cut.tensors), cut.names)
        }
        if odd:
            raise TensorError(
                rank_table(
                    "scatter: src cuts a nest, whose structure every rank must know.",
                    [f"{len(args.tensors)} tensors" for args in ranks],
                    odd,
                    "Pass a nest of the same structure on the other ranks.",
                )
            )
    return cut


def _by_tensor(flat: Sequence[int], world: int) -> list[tuple[int, ...]]:
    return [tuple(flat[i : i + world]) for i in range(0, len(flat), world)]


def _with_known(
    call: Call, found: Sequence[int], own: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """Sizes found by a graph, by tensor; the rank's own are known before the graph runs."""
    by_tensor = [list(sizes) for sizes in _by_tensor(found, call.size)]
    for sizes, known in zip(by_tensor, own, strict=True):
        sizes[call.rank] = known
    return tuple(tuple(sizes) for sizes in by_tensor)


# ---- the exchanges --------------------------------------------------------------------------


@unrecorded
def _lengths(
    call: Call,
    operation: str,
    leaves: Leaves,
    dims: Sequence[int],
    _amounts: SizesByTensor,
    root: int,
) -> tuple[tuple[int, ...], ...]:
    rows = exchange(call, operation, leaves, dims, None, root)
    lengths = rows.lengths()
    if lengths is None:
        raise pieces_differ(call, leaves, rows.decoded(), free=True)
    return lengths


@unrecorded
def _amounts(
    call: Call,
    operation: str,
    leaves: Leaves,
    dims: Sequence[int],
    amounts: SizesByTensor,
    *_: Any,
) -> tuple[tuple[int, ...], ...]:
    rows = exchange(call, operation, leaves, dims, amounts)
    found = rows.amounts()
    if found is None:
        raise pieces_differ(call, leaves, rows.decoded(), free=True)
    return found


@unrecorded
def _same_shapes(
    call: Call, operation: str, leaves: Leaves, dims: Sequence[int], *_: Any
) -> tuple[tuple[int, ...], ...]:
    rows = exchange(call, operation, leaves, dims)
    if not rows.same():
        raise pieces_differ(call, leaves, rows.decoded(), free=False)
    return ()


def _own_amounts(
    call: Call,
    _operation: str,
    leaves: Leaves,
    dims: Sequence[int],
    amounts: SizesByTensor,
    src: int,
) -> tuple[tuple[int, ...], ...]:
    told, own = told_by_src(call, leaves, dims, amounts, src)
    for spec, tensor in zip(told.tensors, leaves.tensors, strict=True):
        shape = list(tensor.shape)
        shape[spec.dim : spec.dim + 1] = [spec.shape[spec.dim]]
        if spec.dtype != tensor.dtype or tuple(shape) != spec.shape:
            raise TensorError(
                f"scatter: in a compiled graph this rank passes {tuple(tensor.shape)} "
                f"{tensor.dtype}, but src {src} cuts {spec}.\n"
                "Give it a tensor with the dtype and the other dimensions of the one on src."
            )
    return tuple((amount,) for amount in own)


_EXCHANGES: dict[str, Callable[..., tuple[tuple[int, ...], ...]]] = {
    **dict.fromkeys(("all_gather", "gather", "permute", "gather_sizes"), _lengths),
    "all_to_all": _amounts,
    **dict.fromkeys(
        ("reduce_scatter", "all_reduce", "broadcast", "reduce", "scan", "shift"), _same_shapes
    ),
    "scatter": _own_amounts,
}


# ---- in a graph -----------------------------------------------------------------------------


class _Names(NamedTuple):
    """Stands for the nest of a call in a graph: the names of its leaves."""

    text: str

    def names(self) -> list[str]:
        return self.text.split("\n")


def _in_graph(
    call: Call,
    operation: str,
    leaves: Leaves,
    dims: Sequence[int],
    *,
    outputs: int,
    amounts: SizesByTensor = (),
    root: int = -1,
) -> list[int]:
    from allgrad._autograd import graph_ops

    if functorch_active() and not FINDS_LENGTHS_IN_TRANSFORMS:
        raise ModeError(
            f"{call.name}: this torch finds out no sizes in a compiled torch.func transform.\n"
            "Give the sizes, or use torch 2.13 or newer."
        )
    return graph_ops.exchange(
        call,
        leaves.tensors,
        operation,
        outputs=outputs,
        dims=dims,
        amounts=[n for sizes in amounts for n in sizes],
        names="" if leaves.frame is None else "\n".join(leaves.names()),
        root=root,
    )


def _exchange_of_graph(  # noqa: PLR0917
    call: Call,
    xs: list[Tensor],
    operation: str,
    dims: list[int],
    amounts: list[int],
    names: str,
    root: int,
) -> list[int]:
    """Make the exchange of a graph's op; the lengths that it finds."""
    leaves = Leaves(xs, _Names(names) if names else None)  # type: ignore[arg-type]
    by_tensor = _by_tensor(amounts, call.size)
    found = _EXCHANGES[operation](call, operation, leaves, dims, by_tensor, root)
    return [n for sizes in found for n in sizes]


HANDSHAKE.append(_exchange_of_graph)
