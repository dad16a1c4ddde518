"""all_gather <-> reduce_scatter; all_gather of a value that counts once <-> split."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from allgrad._autograd.adjoint_pair import AdjointPair, makes_pair
from allgrad._autograd.transforms import apply
from allgrad._core import reductions
from allgrad._core.partition import Cut, apart, plain
from allgrad._wire import primitives as wire
from allgrad.collectives._inputs import (
    Grad,
    Nest,
    Sizes,
    Taken,
    announce,
    attempt,
    check_grad,
    only_shapes,
    shapes,
    shares,
    take,
    way_to_run,
)
from allgrad.collectives._pair_cache import frozen, recall, remember
from allgrad.collectives._size_exchange import check_equal_shapes, own_pieces
from allgrad.collectives.all_to_all import exchange_pair
from allgrad.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from allgrad._autograd.adjoint_pair import Ends
    from allgrad._wire.primitives import Group, GroupLike

__all__ = [
    "all_gather",
    "gather_pair",
    "once_pair",
    "reduce_pieces",
    "reduce_scatter",
    "sizes",
    "split",
]


def all_gather(
    x: Nest,
    dim: int = 0,
    *,
    sizes: Sizes = None,
    group: GroupLike = None,
    grad: Grad = "sum",
    async_op: bool = False,
) -> Nest:
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
    given = None if sizes is None else ("all_gather", x, group, dim, frozen(sizes), grad)
    known = None if async_op or given is None else recall(*given)
    if known is not None:
        return apply(known, (x,), stop=grad == "none")[0]  # type: ignore[arg-type, return-value]
    ranks = wire.resolve("all_gather", group, lambda: f"dim={dim}, grad={grad}, {shapes(x, dim)}")
    check_grad("all_gather", grad)
    taken, cut = own_pieces("all_gather", ranks, x, dim, sizes)
    make_pair = once_pair if grad == "same" else gather_pair

    def run(which: list[int], xs: list[Tensor]) -> Any:
        pair = make_pair(ranks, cut.of(which))
        if given is not None and xs[0] is x:  # not a vector made of a single number
            remember(pair, *given)
        return way_to_run(async_op)(pair, xs, stop=grad == "none")

    return taken.run(run, async_op=async_op)


def reduce_scatter(
    x: Nest,
    dim: int = 0,
    op: reductions.Op = "sum",
    *,
    sizes: Sizes = None,
    group: GroupLike = None,
    async_op: bool = False,
) -> Nest:
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
    given = None if sizes is None else ("reduce_scatter", x, group, dim, op, frozen(sizes))
    known = None if async_op or given is None else recall(*given)
    if known is not None:
        return apply(known, (x,))[0]  # type: ignore[arg-type, return-value]
    ranks = wire.resolve("reduce_scatter", group, lambda: f"dim={dim}, op={op}, {shapes(x)}")

    def check() -> tuple[Taken[Nest], Cut, list[reductions.Reduction]]:
        taken = take("reduce_scatter", x)
        dims = taken.dims("reduce_scatter", dim)
        found = [reductions.find("reduce_scatter", op, t.dtype) for t in taken.tensors]
        taken = taken.at_least_vectors()
        return taken, _shares("reduce_scatter", ranks, taken, dims, sizes), found

    verify = sizes is None and ranks.size > 1
    checked = attempt(check, others_wait=verify)
    if isinstance(checked, InputError):
        raise announce("reduce_scatter", ranks, x, checked)
    taken, cut, found = checked
    if verify and not (only_shapes(taken) and not torch.compiler.is_compiling()):
        check_equal_shapes("reduce_scatter", ranks, taken, cut.dims)

    def run(which: list[int], xs: list[Tensor]) -> Any:
        reduction = found[which[0]]
        if not reduction.linear:
            return reduce_pieces(ranks, reduction, xs, cut.of(which))
        share = 1 if reduction.name == "sum" else ranks.size
        pair = gather_pair(ranks, cut.of(which), share).adjoint
        if given is not None and xs[0] is x:  # not a vector made of a single number
            remember(pair, *given)
        return way_to_run(async_op)(pair, xs)

    return taken.run(run, async_op=async_op)


def reduce_pieces(
    ranks: Group, reduction: reductions.Reduction, xs: Sequence[Tensor], cut: Cut
) -> list[Tensor]:
    """Bring the pieces together, reduce them, and keep the own one, arguments known to be good."""
    own = [sizes[ranks.rank] for sizes in cut.sizes]
    incoming = Cut(cut.dims, tuple((size,) * ranks.size for size in own))
    exchanged = apply(exchange_pair(ranks, cut, incoming), xs)
    return [
        reduction.stacked(x.unflatten(dim, (ranks.size, size)), dim)
        for x, dim, size in zip(exchanged, cut.dims, own, strict=True)
    ]


def split(
    x: Nest,
    dim: int = 0,
    *,
    sizes: Sizes = None,
    group: GroupLike = None,
    async_op: bool = False,
) -> Nest:
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
    ranks = wire.resolve("split", group, lambda: f"dim={dim}, {shapes(x)}")
    taken = take("split", x)
    dims = taken.dims("split", dim)
    taken = taken.at_least_vectors()
    cut = _shares("split", ranks, taken, dims, sizes)
    run = way_to_run(async_op)
    return taken.run(
        lambda which, xs: run(once_pair(ranks, cut.of(which)).adjoint, xs), async_op=async_op
    )


def sizes(x: object, dim: int = 0, *, group: GroupLike = None) -> Any:
    """Tell what each rank holds along ``dim``, in rank order.

        rank 0   [ a a ]              (2, 1, 3)
        rank 1   [ b ]       --->     (2, 1, 3)
        rank 2   [ c c c ]            (2, 1, 3)

    For a nest, the nest of such tuples.

    Cost: one size exchange. Pass the result as ``sizes=`` to save it in later calls.
    """
    ranks = wire.resolve("sizes", group, lambda: f"dim={dim}, {shapes(x, dim)}")
    taken, cut = own_pieces("sizes", ranks, x, dim, None)
    return taken.put_back(cut.sizes)


def _shares(op: str, ranks: Group, taken: Taken[Any], dims: tuple[int, ...], sizes: Sizes) -> Cut:
    lengths = (t.shape[dim] for t, dim in zip(taken.tensors, dims, strict=True))
    return Cut(dims, tuple(shares(op, ranks, length, sizes) for length in lengths))


def _ends(ranks: Group, cut: Cut, *_: int) -> Ends:
    return cut.lengths(ranks.rank), cut.totals()


@makes_pair("all_gather", _ends)
def gather_pair(ranks: Group, cut: Cut, divided_by: int = 1) -> AdjointPair:
    """all_gather <-> reduce_scatter, both divided by a number where a mean is meant."""

    def gather(xs: Sequence[Tensor]) -> list[Tensor]:
        out = wire.all_gather(ranks, cut.pieces(xs), cut.counts(xs))
        return cut.join(_divide(out, divided_by), xs)

    def reduce_and_keep(xs: Sequence[Tensor]) -> list[Tensor]:
        out = wire.reduce_scatter(ranks, cut.lay_out(xs), cut.counts(xs))
        return apart(_divide(out, divided_by), cut.shapes(xs, ranks.rank))

    return AdjointPair("all_gather", "reduce_scatter", gather, reduce_and_keep)


@makes_pair("all_gather same", _ends)
def once_pair(ranks: Group, cut: Cut) -> AdjointPair:
    """all_gather <-> split: pieces on one side, on the other a joined value that counts once."""

    def keep(xs: Sequence[Tensor]) -> list[Tensor]:
        return [plain(x) if not x.is_contiguous() else x.clone() for x in cut.own(xs, ranks.rank)]

    return AdjointPair("all_gather", "split", gather_pair(ranks, cut).forward, keep)


def _divide(fresh: Tensor, by: int) -> Tensor:
    return fresh if by == 1 else fresh.div_(by)
