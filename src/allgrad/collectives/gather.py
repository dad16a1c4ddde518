"""gather <-> scatter."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch

from allgrad import agreement, wire
from allgrad.adjoint_pair import AdjointPair
from allgrad.collectives.arguments import (
    Sizes,
    announce,
    attempt,
    check_rank,
    pieces,
    require_fit,
    shares,
    vector_at_least,
)
from allgrad.errors import InputError, TensorError, rank_table
from allgrad.ragged import join, lay_out, plain
from allgrad.transforms import apply

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from allgrad.agreement import Announcement
    from allgrad.wire import Group, GroupLike

__all__ = ["gather", "scatter", "to_one_pair"]


def gather(
    x: Tensor, dst: int = 0, dim: int = 0, *, sizes: Sizes = None, group: GroupLike = None
) -> Tensor:
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
    ranks = wire.resolve("gather", group)
    dst = check_rank("gather", ranks, "dst", dst)
    x, dim, found = pieces("gather", ranks, x, dim, sizes)
    return apply(to_one_pair(ranks, found, dim, dst), x)


def scatter(
    x: Tensor | None,
    src: int = 0,
    dim: int = 0,
    *,
    sizes: Sizes = None,
    group: GroupLike = None,
) -> Tensor:
    """Cut what ``src`` holds along ``dim``, and give each rank its piece.

        rank 0   [ a a | b | c c c ]         [ a a ]
        rank 1   None                  --->  [ b ]
        rank 2   None                        [ c c c ]

    Gradient: ``gather`` to ``src`` with the same sizes.

        rank 0   [ A A | B | C C C ]         [ A A ]
        rank 1   -                     <---  [ B ]
        rank 2   -                           [ C C C ]

    ``sizes`` are read on ``src``; ``None`` cuts as evenly as possible. Off ``src`` a tensor that
    is empty along ``dim`` may stand for None; it then has an (empty) gradient.

    Cost: one collective each way, and one exchange in which ``src`` tells shape and dtype.
    """
    ranks = wire.resolve("scatter", group)
    src = check_rank("scatter", ranks, "src", src)

    def check() -> tuple[Tensor | None, int, tuple[int, ...]]:
        here = ranks.rank == src
        if x is None and here:
            raise TensorError("scatter: x is None on src.\nGive src the tensor to cut.")
        if x is None:
            return None, 0, ()
        tensor, axis = vector_at_least("scatter", x, dim)
        if here:
            return tensor, axis, shares("scatter", ranks, tensor.shape[axis], sizes)
        if tensor.shape[axis]:
            raise TensorError("scatter: only src holds x.\nPass None on the other ranks.")
        return tensor, axis, ()

    checked = attempt(check, others_wait=ranks.size > 1)
    if isinstance(checked, InputError):
        announce("scatter", ranks, x, checked)
    assert not isinstance(checked, InputError)
    whole, axis, cut = checked
    told = _source(announce("scatter", ranks, whole, axis, cut or None), src)
    if whole is None:
        shape = [*told.shape[: told.dim], 0, *told.shape[told.dim + 1 :]]
        device = wire.message_device(ranks, torch.get_default_device())
        whole = torch.empty(shape, dtype=told.dtype, device=device)
    if ranks.rank != src:
        cut = tuple(told.count if rank == ranks.rank else 0 for rank in range(ranks.size))
    return apply(to_one_pair(ranks, cut, told.dim, src).adjoint, whole)


def to_one_pair(ranks: Group, sizes: Sequence[int], dim: int, root: int) -> AdjointPair:
    """Gather <-> scatter. Off ``root`` only the own entry of ``sizes`` is looked at."""
    here, own = ranks.rank == root, sizes[ranks.rank]

    def counts(x: Tensor) -> tuple[list[int], list[int]]:
        """What the pieces' side sends, and what the root's side receives."""
        others = prod(x.shape[:dim]) * prod(x.shape[dim + 1 :])
        out = [own * others if rank == root else 0 for rank in range(ranks.size)]
        into = [size * others if here else 0 for size in sizes]
        return out, into

    def collect(x: Tensor) -> Tensor:
        out, into = counts(x)
        flat = wire.all_to_all(ranks, plain(x).view(-1), out, into)
        if here:
            return join(flat, x.shape, sizes, dim)
        return flat.view([*x.shape[:dim], 0, *x.shape[dim + 1 :]])

    def deal(x: Tensor) -> Tensor:
        out, into = counts(x)
        flat = lay_out(x, sizes, dim) if here else x.new_empty(0)
        mine = wire.all_to_all(ranks, flat, into, out)
        return mine.view([*x.shape[:dim], own, *x.shape[dim + 1 :]])

    return AdjointPair("gather", "scatter", collect, deal)


def _source(heard: Sequence[Announcement], src: int) -> Announcement:
    """What src tells, once every rank agrees that it is src and fits it."""
    told = heard[src]
    rows = [agreement.describe(a) for a in heard]
    if told.dtype is None or any(a.shape and a.shape[a.dim] for a in heard if a is not told):
        raise TensorError(
            rank_table(
                "scatter: src holds the tensor to cut.",
                rows,
                {src: "is src for some rank"},
                "Give every rank the same src.",
            )
        )
    require_fit("scatter", [a for a in heard if a.dtype is not None], told.dim)
    return told
