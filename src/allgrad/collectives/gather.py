"""gather <-> scatter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from allgrad._autograd.adjoint_pair import AdjointPair, makes_pair
from allgrad._core.partition import Cut, apart
from allgrad._core.torch_internals import lengths_differ
from allgrad._wire import primitives as wire
from allgrad.collectives._inputs import (
    Nest,
    Sizes,
    Taken,
    announce,
    attempt,
    check_rank,
    given_sizes,
    only_shapes,
    shapes,
    shares,
    take,
    way_to_run,
)
from allgrad.collectives._size_exchange import amounts_from, own_pieces, told_by_source
from allgrad.errors import InputError, ModeError, SizesError, TensorError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from allgrad._autograd.adjoint_pair import Ends
    from allgrad._wire.handshake import Brought
    from allgrad._wire.primitives import Group, GroupLike

__all__ = ["gather", "scatter", "to_one_pair"]


def gather(
    x: Nest,
    dst: int = 0,
    dim: int = 0,
    *,
    sizes: Sizes = None,
    group: GroupLike = None,
    async_op: bool = False,
) -> Nest:
    """Give ``dst`` all pieces, joined along ``dim`` in rank order; the others get an empty piece.

        rank 0   [ a a ]              [ a a | b | c c c ]
        rank 1   [ b ]       --->     [ ]
        rank 2   [ c c c ]            [ ]

    Gradient: ``scatter`` from ``dst`` with the same sizes.

        rank 0   [ A A ]              [ A A | B | C C C ]
        rank 1   [ B ]       <---     [ ]
        rank 2   [ C C C ]            [ ]

    Use the result on every rank, if only by adding its sum to the loss: backward needs everyone.

    Cost: one collective each way, plus one size exchange unless ``sizes`` is given.
    """
    ranks = wire.resolve("gather", group, lambda: f"dst={dst}, dim={dim}, {shapes(x, dim)}")
    dst = check_rank("gather", ranks, "dst", dst)
    taken, cut = own_pieces("gather", ranks, x, dim, sizes)
    run = way_to_run(async_op)
    return taken.run(
        lambda which, xs: run(to_one_pair(ranks, cut.of(which), dst), xs), async_op=async_op
    )


def scatter(
    x: Any,
    src: int = 0,
    dim: int = 0,
    *,
    sizes: Sizes = None,
    group: GroupLike = None,
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

    ``sizes`` are read on ``src``; ``None`` cuts as evenly as possible. Off ``src`` a tensor that
    is empty along ``dim`` may stand for None; it then has an (empty) gradient. When ``src`` cuts a
    nest, the others pass the same nest of such empty tensors. Under ``torch.compile``
    every rank passes such tensors.

    Cost: one collective each way, and one exchange in which ``src`` tells shape and dtype.
    """
    ranks = wire.resolve("scatter", group, lambda: f"src={src}, dim={dim}")
    src = check_rank("scatter", ranks, "src", src)

    here = ranks.rank == src

    def check() -> tuple[Taken[Any], Cut]:
        if here and x is None:
            raise TensorError("scatter: x is None on src.\nGive src the tensor to cut.")
        taken = Taken([], None) if x is None else take("scatter", x)
        dims = taken.dims("scatter", dim)
        taken = taken.at_least_vectors()
        lengths = [t.shape[axis] for t, axis in zip(taken.tensors, dims, strict=True)]
        if here:
            return taken, Cut(dims, tuple(shares("scatter", ranks, n, sizes) for n in lengths))
        if any(lengths):
            raise TensorError("scatter: only src holds x.\nPass None on the other ranks.")
        return taken, Cut(dims, tuple((0,) * ranks.size for _ in lengths))

    checked = attempt(check, others_wait=ranks.size > 1)
    if isinstance(checked, InputError):
        raise announce("scatter", ranks, x, checked)
    taken, cut = checked
    if torch.compiler.is_compiling() and ranks.size > 1:
        cut = _cut_in_graph(ranks, taken, cut, src, sizes)
    elif only_shapes(taken) and _is_known(ranks, taken, sizes):
        if not here:
            cut = Cut(cut.dims, (given_sizes("scatter", ranks, sizes),) * len(cut.dims))
    else:
        taken, cut = _told(ranks, taken, cut, src)
    run = way_to_run(async_op)
    return taken.run(
        lambda which, xs: run(to_one_pair(ranks, cut.of(which), src).adjoint, xs), async_op=async_op
    )


def _is_known(ranks: Group, taken: Taken[Any], sizes: Sizes) -> bool:
    """Tell whether every rank knows what it gets without being told."""
    given = sizes is not None and not isinstance(sizes, str)
    return ranks.size == 1 or (given and bool(taken.tensors))


def _told(ranks: Group, taken: Taken[Any], cut: Cut, src: int) -> tuple[Taken[Any], Cut]:
    """What each rank brings and gets, as src tells it."""
    told = told_by_source(ranks, taken, cut.dims, cut.sizes, src)
    if ranks.rank == src:
        return taken, cut
    cut = _only_own(ranks, tuple(b.dim for b in told), [b.amount for b in told])
    return taken if taken.tensors else _empty(ranks, told), cut


def _cut_in_graph(ranks: Group, taken: Taken[Any], cut: Cut, src: int, sizes: Sizes) -> Cut:
    """The same in a graph, where a rank off src has tensors: their dtypes belong to the graph."""
    if not taken.tensors:
        raise ModeError(
            "scatter: under torch.compile x is a tensor on every rank.\n"
            "Give the ranks off src a tensor that is empty along dim."
        )
    own = amounts_from(src, ranks, taken, cut)
    if ranks.rank == src:
        return cut
    if _is_known(ranks, taken, sizes):
        given = given_sizes("scatter", ranks, sizes)[ranks.rank]
        if any(lengths_differ(length, given) for length in own):
            raise SizesError("scatter: sizes= differ from src's.\nGive every rank the same sizes.")
        own = [given] * len(own)
    return _only_own(ranks, cut.dims, own)


def _only_own(ranks: Group, dims: tuple[int, ...], own: Sequence[int]) -> Cut:
    """The cut as a rank knows it that only gets its own blocks."""
    sizes = ([n if r == ranks.rank else 0 for r in range(ranks.size)] for n in own)
    return Cut(dims, tuple(map(tuple, sizes)))


def _empty(ranks: Group, told: Sequence[Brought]) -> Taken[Any]:
    """Stands for None on a rank that only receives."""
    device = wire.message_device(ranks, torch.get_default_device())
    shapes = [[*b.shape[: b.dim], 0, *b.shape[b.dim + 1 :]] for b in told]
    tensors = [
        torch.empty(shape, dtype=b.dtype, device=device)
        for shape, b in zip(shapes, told, strict=True)
    ]
    return Taken(tensors, None)


def _ends(ranks: Group, cut: Cut, root: int) -> Ends:
    joined = cut.totals() if ranks.rank == root else [0] * len(cut.dims)
    return cut.lengths(ranks.rank), joined


@makes_pair("gather", _ends)
def to_one_pair(ranks: Group, cut: Cut, root: int) -> AdjointPair:
    """Gather <-> scatter. Off ``root`` only the own sizes are looked at."""
    here = ranks.rank == root

    def counts(xs: Sequence[Tensor]) -> tuple[Sequence[int], Sequence[int]]:
        """What the pieces' side sends, and what the root's side receives."""
        by_rank = cut.counts(xs)
        out = [by_rank[ranks.rank] if rank == root else 0 for rank in range(ranks.size)]
        return out, by_rank if here else [0] * ranks.size

    def collect(xs: Sequence[Tensor]) -> list[Tensor]:
        out, into = counts(xs)
        flat = wire.all_to_all(ranks, cut.pieces(xs), out, into)
        return cut.join(flat, xs) if here else apart(flat, cut.none(xs))

    def deal(xs: Sequence[Tensor]) -> list[Tensor]:
        out, into = counts(xs)
        flat = cut.lay_out(xs) if here else cut.nothing(xs)
        return apart(wire.all_to_all(ranks, flat, into, out), cut.shapes(xs, ranks.rank))

    return AdjointPair("gather", "scatter", collect, deal)
