"""permute and shift <-> the inverse permutation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from allgrad._autograd.adjoint_pair import AdjointPair, makes_pair
from allgrad._core.partition import Cut, apart
from allgrad._wire import primitives as wire
from allgrad.collectives._inputs import Nest, Sizes, check_rank, shapes, way_to_run
from allgrad.collectives._size_exchange import own_pieces
from allgrad.errors import GroupError, InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

    from allgrad._autograd.adjoint_pair import Ends
    from allgrad._wire.primitives import Group, GroupLike

__all__ = ["permute", "permute_pair", "shift"]


def permute(
    x: Nest,
    pairs: Iterable[tuple[int, int]],
    *,
    dim: int = 0,
    sizes: Sizes = None,
    group: GroupLike = None,
    async_op: bool = False,
) -> Nest:
    """Send pieces from rank to rank, as ``(from, to)`` pairs say.

        pairs = [(0, 1), (1, 2)]

        rank 0   [ a a ]              [ 0 0 ]
        rank 1   [ b ]       --->     [ a a ]
        rank 2   [ c c c ]            [ b ]

    A rank to which nobody sends gets zeros, as many as it held. No rank sends or receives twice.

    Gradient: the pieces go back. What was sent nowhere has gradient zero.

        rank 0   [ A A ]              [ - - ]
        rank 1   [ B ]       <---     [ A A ]
        rank 2   [ 0 0 0 ]            [ B ]

    ``sizes`` are what each rank holds along ``dim``, as in ``all_gather``.

    Cost: one collective each way, plus one size exchange unless ``sizes`` is given.
    """
    ranks = wire.resolve("permute", group, lambda: f"{pairs}, dim={dim}, {shapes(x, dim)}")
    to = _destinations("permute", ranks, pairs)
    taken, cut = own_pieces("permute", ranks, x, dim, sizes)
    run = way_to_run(async_op)
    return taken.run(
        lambda which, xs: run(permute_pair(ranks, cut.of(which), *to), xs), async_op=async_op
    )


def shift(
    x: Nest,
    offset: int = 1,
    *,
    wrap: bool = True,
    dim: int = 0,
    sizes: Sizes = None,
    group: GroupLike = None,
    async_op: bool = False,
) -> Nest:
    """Send the piece ``offset`` ranks on, around the end unless ``wrap=False``.

        rank 0   [ a a ]              [ c c c ]
        rank 1   [ b ]       --->     [ a a ]
        rank 2   [ c c c ]            [ b ]

    Gradient: the shift back. Without ``wrap`` the first ranks get zeros, as many as they held.

        rank 0   [ A A ]              [ C C C ]
        rank 1   [ B ]       <---     [ A A ]
        rank 2   [ C C C ]            [ B ]

    Cost: as ``permute``.
    """
    ranks = wire.resolve(
        "shift", group, lambda: f"offset={offset}, wrap={wrap}, dim={dim}, {shapes(x, dim)}"
    )
    if isinstance(offset, bool) or not isinstance(offset, int):
        raise InputError(f"shift: offset={offset!r} is not a whole number.\nGive ranks to move on.")
    landing = [rank + offset for rank in range(ranks.size)]
    to = [rank % ranks.size if wrap or 0 <= rank < ranks.size else -1 for rank in landing]
    taken, cut = own_pieces("permute", ranks, x, dim, sizes)
    run = way_to_run(async_op)
    return taken.run(
        lambda which, xs: run(permute_pair(ranks, cut.of(which), *to), xs), async_op=async_op
    )


def _ends(ranks: Group, cut: Cut, *to: int) -> Ends:
    came_from = to.index(ranks.rank) if ranks.rank in to else ranks.rank
    return cut.lengths(ranks.rank), cut.lengths(came_from)


@makes_pair("permute", _ends)
def permute_pair(ranks: Group, cut: Cut, *destinations: int) -> AdjointPair:
    """Pieces from each rank to its destination, or nowhere if that is -1 <-> pieces back."""
    to = {a: b for a, b in enumerate(destinations) if b >= 0}
    back = {b: a for a, b in to.items()}
    landed = (tuple(s[back.get(rank, rank)] for rank in range(ranks.size)) for s in cut.sizes)
    after = Cut(cut.dims, tuple(landed))

    def move(
        xs: Sequence[Tensor], to: Mapping[int, int], back: Mapping[int, int], cut: Cut, result: Cut
    ) -> list[Tensor]:
        send, receive = [0] * ranks.size, [0] * ranks.size
        if ranks.rank in to:
            send[to[ranks.rank]] = cut.counts(xs)[ranks.rank]
        if ranks.rank in back:
            receive[back[ranks.rank]] = result.counts(xs)[ranks.rank]
        sent = cut.pieces(xs) if ranks.rank in to else cut.nothing(xs)
        got = wire.all_to_all(ranks, sent, send, receive)
        shapes = result.shapes(xs, ranks.rank)
        return apart(got, shapes) if ranks.rank in back else [got.new_zeros(s) for s in shapes]

    return AdjointPair(
        "permute",
        "permute",
        lambda xs: move(xs, to, back, cut, after),
        lambda xs: move(xs, back, to, after, cut),
    )


def _destinations(op: str, ranks: Group, pairs: Iterable[tuple[int, int]]) -> list[int]:
    """Where each rank sends to; -1 for nowhere."""
    to = [-1] * ranks.size
    for entry in pairs:
        if not isinstance(entry, (tuple, list)) or len(entry) != 2:
            raise InputError(f"{op}: {entry!r} is not a (from, to) pair.\nGive pairs of ranks.")
        a = check_rank(op, ranks, "from", entry[0])
        b = check_rank(op, ranks, "to", entry[1])
        if to[a] >= 0 or b in to:
            twice = f"rank {a} sends" if to[a] >= 0 else f"rank {b} receives"
            raise GroupError(
                f"{op}: {twice} twice.\nGive each rank at most one to send to and one to hear from."
            )
        to[a] = b
    return to
