"""Sizes that the ranks find out from each other before a call: in eager code, or as an op in a graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from allgrad._autograd.adjoint_pair import HANDSHAKE
from allgrad._core.partition import Cut
from allgrad.collectives._inputs import (
    Nest,
    Sizes,
    Taken,
    announce,
    attempt,
    exchange,
    held_sizes,
    require_fit,
    take,
)
from allgrad.errors import InputError, TensorError, rank_table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from allgrad._wire.handshake import Announcement, Brought
    from allgrad._wire.primitives import Group

__all__ = [
    "amounts_from",
    "arriving_sizes",
    "check_equal_shapes",
    "own_pieces",
    "sizes_by_rank",
    "told_by_source",
]


def own_pieces(
    op: str, group: Group, x: Nest, dim: object, sizes: Sizes
) -> tuple[Taken[Nest], Cut]:
    """Check pieces of a ragged whole, and find what each rank holds of it.

    With ``sizes=None`` a mistake on one rank is told to all of them in the size exchange.
    """

    def check() -> tuple[Taken[Nest], tuple[int, ...]]:
        taken = take(op, x)
        dims = taken.dims(op, dim)
        return taken.at_least_vectors(), dims

    find_out = sizes is None and group.size > 1
    checked = attempt(check, others_wait=find_out)
    if isinstance(checked, InputError):
        raise announce(op, group, x, checked)
    taken, dims = checked
    lengths = [t.shape[d] for t, d in zip(taken.tensors, dims, strict=True)]
    if not find_out:
        known = "equal" if sizes is None else sizes
        return taken, Cut(dims, tuple(held_sizes(op, group, n, known) for n in lengths))
    return taken, sizes_by_rank(op, group, taken, dims)


def sizes_by_rank(op: str, group: Group, taken: Taken[Any], dims: tuple[int, ...]) -> Cut:
    """What every rank holds of each tensor along its dim."""
    if not torch.compiler.is_compiling():
        return Cut(dims, tuple(_by_tensor(_held(op, group, taken, dims), group.size)))
    found = _in_graph(op, group, taken, dims, outputs=len(dims) * group.size)
    held = [list(sizes) for sizes in _by_tensor(found, group.size)]
    for sizes, tensor, dim in zip(held, taken.tensors, dims, strict=True):
        sizes[group.rank] = tensor.shape[dim]  # known before the graph runs
    return Cut(dims, tuple(map(tuple, held)))


def arriving_sizes(group: Group, taken: Taken[Any], send: Cut) -> Cut:
    """What every rank sends to this one of each tensor, in all_to_all."""
    if not torch.compiler.is_compiling():
        found = _arriving("all_to_all", group, taken, send.dims, send.sizes)
    else:
        outputs = len(send.dims) * group.size
        found = _in_graph("all_to_all", group, taken, send.dims, outputs=outputs, counts=send.sizes)
    arriving = [list(sizes) for sizes in _by_tensor(found, group.size)]
    for sizes, sent in zip(arriving, send.sizes, strict=True):
        sizes[group.rank] = sent[group.rank]
    return Cut(send.dims, tuple(map(tuple, arriving)))


def check_equal_shapes(op: str, group: Group, taken: Taken[Any], dims: tuple[int, ...]) -> None:
    """Raise on every rank unless all have one shape."""
    if torch.compiler.is_compiling():
        _in_graph(op, group, taken, dims, outputs=0)
    else:
        _equal_shapes(op, group, taken, dims)


def amounts_from(src: int, group: Group, taken: Taken[Any], cut: Cut) -> list[int]:
    """What this rank gets of each tensor that ``src`` cuts, in a graph."""
    outputs = len(cut.dims)
    return _in_graph("scatter", group, taken, cut.dims, outputs=outputs, counts=cut.sizes, root=src)


def told_by_source(
    group: Group, taken: Taken[Any], dims: Sequence[int], counts: Sequence[Sequence[int]], src: int
) -> tuple[Brought, ...]:
    """What src tells, once every rank agrees that it is src and fits it."""
    heard = exchange("scatter", group, taken, dims, counts)
    told = heard[src].tensors
    if not told or any(b.shape[b.dim] for r, a in enumerate(heard) if r != src for b in a.tensors):
        raise TensorError(
            rank_table(
                "scatter: src holds the tensor to cut.",
                [", ".join(str(b) for b in a.tensors) or "no tensor" for a in heard],
                {src: "is src for some rank"},
                "Give every rank the same src.",
            )
        )
    if heard[src].names and any(not a.tensors for a in heard):
        raise TensorError(
            rank_table(
                "scatter: src cuts a nest, whose structure every rank must know.",
                [f"{len(a.tensors)} tensors" for a in heard],
                {rank: "passed none" for rank, a in enumerate(heard) if not a.tensors},
                "Pass the same nest on the other ranks, of tensors that are empty along dim.",
            )
        )
    if taken.tensors:
        require_fit("scatter", taken, [a for a in heard if a.tensors], free=True)
    return told


def _by_tensor(flat: Sequence[int], world: int) -> list[tuple[int, ...]]:
    return [tuple(flat[i : i + world]) for i in range(0, len(flat), world)]


# ---- what is sent, in eager code and by the op --------------------------------------------------


def _held(op: str, group: Group, taken: Taken[Any], dims: Sequence[int], *_: Any) -> list[int]:
    heard = exchange(op, group, taken, dims)
    require_fit(op, taken, heard, free=True)
    return _of_each_tensor(heard, lambda b: b.shape[b.dim])


def _arriving(
    op: str,
    group: Group,
    taken: Taken[Any],
    dims: Sequence[int],
    counts: Sequence[Sequence[int]],
    *_: Any,
) -> list[int]:
    heard = exchange(op, group, taken, dims, counts)
    require_fit(op, taken, heard, free=True)
    return _of_each_tensor(heard, lambda b: b.amount)


def _equal_shapes(
    op: str, group: Group, taken: Taken[Any], dims: Sequence[int], *_: Any
) -> list[int]:
    require_fit(op, taken, exchange(op, group, taken, dims), free=False)
    return []


def _amounts(
    _op: str,
    group: Group,
    taken: Taken[Any],
    dims: Sequence[int],
    counts: Sequence[Sequence[int]],
    src: int,
) -> list[int]:
    return [b.amount for b in told_by_source(group, taken, dims, counts, src)]


def _of_each_tensor(heard: Sequence[Announcement], what: Callable[[Brought], int]) -> list[int]:
    """Tensor after tensor, what every rank tells of it."""
    by_rank = [[what(b) for b in a.tensors] for a in heard]
    return [n for of_tensor in zip(*by_rank, strict=True) for n in of_tensor]


_EXCHANGES: dict[str, Callable[..., list[int]]] = {
    **dict.fromkeys(("all_gather", "gather", "permute", "sizes"), _held),
    "all_to_all": _arriving,
    "reduce_scatter": _equal_shapes,
    "scatter": _amounts,
}


# ---- as an op ------------------------------------------------------------------------------------


class _Named(NamedTuple):
    """Stands for the nest of a call in a graph: the names of its tensors."""

    text: str

    def names(self) -> list[str]:
        return self.text.split("\n")


def _in_graph(
    op: str,
    group: Group,
    taken: Taken[Any],
    dims: Sequence[int],
    *,
    outputs: int,
    counts: Sequence[Sequence[int]] = (),
    root: int = -1,
) -> list[int]:
    from allgrad._autograd import graph_ops

    names = "" if taken.frame is None else "\n".join(taken.names())
    flat = [n for sizes in counts for n in sizes]
    return graph_ops.exchange(
        op, group, taken.tensors, outputs=outputs, dims=dims, counts=flat, names=names, root=root
    )


def _exchange_of_graph(  # noqa: PLR0917
    op: str,
    group: Group,
    xs: list[Tensor],
    dims: list[int],
    counts: list[int],
    names: str,
    root: int,
) -> list[int]:
    """Make the exchange that a graph asks for; the lengths found."""
    taken: Taken[Any] = Taken(xs, _Named(names) if names else None)  # type: ignore[arg-type]
    return _EXCHANGES[op](op, group, taken, dims, _by_tensor(counts, group.size), root)


HANDSHAKE.append(_exchange_of_graph)
