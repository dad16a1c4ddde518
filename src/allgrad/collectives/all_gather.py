"""all_gather <-> reduce_scatter; all_gather of a value that counts once <-> split."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from allgrad import reductions, wire
from allgrad.adjoint_pair import AdjointPair
from allgrad.collectives.all_to_all import exchange_pair
from allgrad.collectives.arguments import (
    Grad,
    Sizes,
    announce,
    attempt,
    check_grad,
    pieces,
    require_fit,
    shares,
    vector_at_least,
)
from allgrad.errors import InputError
from allgrad.ragged import join, lay_out, offsets, plain
from allgrad.transforms import apply

if TYPE_CHECKING:
    from torch import Tensor

    from allgrad.wire import Group, GroupLike

__all__ = ["all_gather", "gather_pair", "once_pair", "reduce_scatter", "sizes", "split"]


def all_gather(
    x: Tensor,
    dim: int = 0,
    *,
    sizes: Sizes = None,
    group: GroupLike = None,
    grad: Grad = "sum",
) -> Tensor:
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
    ranks = wire.resolve("all_gather", group)
    check_grad("all_gather", grad)
    x, dim, found = pieces("all_gather", ranks, x, dim, sizes)
    pair = once_pair(ranks, found, dim) if grad == "same" else gather_pair(ranks, found, dim)
    return apply(pair, x, stop=grad == "none")


def reduce_scatter(
    x: Tensor,
    dim: int = 0,
    op: reductions.Op = "sum",
    *,
    sizes: Sizes = None,
    group: GroupLike = None,
) -> Tensor:
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
    ranks = wire.resolve("reduce_scatter", group)

    def check() -> tuple[Tensor, int, reductions.Reduction, tuple[int, ...]]:
        tensor, axis = vector_at_least("reduce_scatter", x, dim)
        reduction = reductions.find("reduce_scatter", op, tensor.dtype)
        cut = shares("reduce_scatter", ranks, tensor.shape[axis], sizes)
        return tensor, axis, reduction, cut

    verify = sizes is None and ranks.size > 1
    checked = attempt(check, others_wait=verify)
    if verify:
        axis_or_problem = checked if isinstance(checked, InputError) else checked[1]
        heard = announce("reduce_scatter", ranks, x, axis_or_problem)
        require_fit("reduce_scatter", heard, None)
    assert not isinstance(checked, InputError)
    tensor, axis, reduction, cut = checked
    return reduce_pieces(ranks, reduction, tensor, axis, cut)


def reduce_pieces(
    ranks: Group, reduction: reductions.Reduction, x: Tensor, dim: int, cut: tuple[int, ...]
) -> Tensor:
    """Reduce and keep the own piece, arguments known to be good."""
    if reduction.linear:
        share = 1 if reduction.name == "sum" else ranks.size
        return apply(gather_pair(ranks, cut, dim, divided_by=share).adjoint, x)
    own = cut[ranks.rank]
    exchanged = apply(exchange_pair(ranks, cut, (own,) * ranks.size, dim), x)
    return reduction.stacked(exchanged.unflatten(dim, (ranks.size, own)), dim)


def split(x: Tensor, dim: int = 0, *, sizes: Sizes = None, group: GroupLike = None) -> Tensor:
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
    ranks = wire.resolve("split", group)
    x, axis = vector_at_least("split", x, dim)
    cut = shares("split", ranks, x.shape[axis], sizes)
    return apply(once_pair(ranks, cut, axis).adjoint, x)


def sizes(x: Tensor, dim: int = 0, *, group: GroupLike = None) -> tuple[int, ...]:
    """Tell what each rank holds along ``dim``, in rank order.

        rank 0   [ a a ]              (2, 1, 3)
        rank 1   [ b ]       --->     (2, 1, 3)
        rank 2   [ c c c ]            (2, 1, 3)

    Cost: one size exchange. Pass the result as ``sizes=`` to save it in later calls.
    """
    ranks = wire.resolve("sizes", group)
    return pieces("sizes", ranks, x, dim, None)[2]


def gather_pair(
    ranks: Group, sizes: tuple[int, ...], dim: int, *, divided_by: int = 1
) -> AdjointPair:
    """all_gather <-> reduce_scatter, both divided by a number where a mean is meant."""

    def gather(x: Tensor) -> Tensor:
        counts = [size * _others(x, dim) for size in sizes]
        out = wire.all_gather(ranks, plain(x).view(-1), counts)
        return join(_divide(out, divided_by), x.shape, sizes, dim)

    def reduce_and_keep(x: Tensor) -> Tensor:
        counts = [size * _others(x, dim) for size in sizes]
        out = wire.reduce_scatter(ranks, lay_out(x, sizes, dim), counts)
        return _divide(out, divided_by).view(_with_length(x, dim, sizes[ranks.rank]))

    return AdjointPair("all_gather", "reduce_scatter", gather, reduce_and_keep)


def once_pair(ranks: Group, sizes: tuple[int, ...], dim: int) -> AdjointPair:
    """all_gather <-> split: pieces on one side, on the other a joined value that counts once."""

    def keep(x: Tensor) -> Tensor:
        own = x.narrow(dim, offsets(sizes)[ranks.rank], sizes[ranks.rank])
        return plain(own).clone() if own.is_contiguous() else plain(own)

    return AdjointPair("all_gather", "split", gather_pair(ranks, sizes, dim).forward, keep)


def _others(x: Tensor, dim: int) -> int:
    return prod(x.shape[:dim]) * prod(x.shape[dim + 1 :])


def _with_length(x: Tensor, dim: int, length: int) -> list[int]:
    return [*x.shape[:dim], length, *x.shape[dim + 1 :]]


def _divide(fresh: Tensor, by: int) -> Tensor:
    return fresh if by == 1 else fresh.div_(by)
