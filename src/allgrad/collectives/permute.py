"""permute and shift <-> the inverse permutation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, overload

from allgrad._autograd.adjoint_pair import AdjointPair, Made, makes_pair
from allgrad._core.partition import Partition, unpack
from allgrad._wire import primitives as wire
from allgrad._wire.consistency import refuse
from allgrad.collectives._inputs import (
    as_index,
    check_bool,
    check_grad,
    check_rank,
    describe,
    named,
    run_known,
)
from allgrad.collectives._pair_cache import hashable, recall
from allgrad.collectives._size_exchange import held_pieces
from allgrad.errors import GroupError, InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from allgrad._autograd.adjoint_pair import Ends
    from allgrad._wire.calls import Call
    from allgrad.types import GroupLike, Handle, Nest, Sizes, SumOrNone

__all__ = ["permute", "permute_pair", "shift"]

_PRIME = (1 << 61) - 1


@overload
def permute(
    x: Nest,
    pairs: Iterable[tuple[int, int]],
    *,
    dim: int = ...,
    sizes: Sizes = ...,
    group: GroupLike = ...,
    grad: SumOrNone = ...,
    async_op: Literal[False] = ...,
) -> Nest: ...
@overload
def permute(
    x: Nest,
    pairs: Iterable[tuple[int, int]],
    *,
    dim: int = ...,
    sizes: Sizes = ...,
    group: GroupLike = ...,
    grad: SumOrNone = ...,
    async_op: Literal[True],
) -> Handle[Nest]: ...
def permute(
    x: Any,
    pairs: Iterable[tuple[int, int]],
    *,
    dim: int = 0,
    sizes: Sizes = None,
    group: GroupLike = None,
    grad: SumOrNone = "sum",
    async_op: bool = False,
) -> Any:
    """Send pieces from rank to rank, as ``(from, to)`` pairs say.

        pairs = [(0, 1), (1, 2)]

        rank 0   [ a a ]              [ 0 0 ]
        rank 1   [ b ]       --->     [ a a ]
        rank 2   [ c c c ]            [ b ]

    A rank to which nobody sends gets zeros, as many as it held. No rank sends or receives twice.
    ``pairs`` may be an array of two columns, except in a compiled function.

    Gradient: the pieces go back. What was sent nowhere has gradient zero.

        rank 0   [ A A ]              [ - - ]
        rank 1   [ B ]       <---     [ A A ]
        rank 2   [ 0 0 0 ]            [ B ]

    ``sizes`` are what each rank holds along ``dim``, as in ``all_gather``.

    Cost: one collective each way, plus one size exchange unless ``sizes`` is given.
    """
    listed = _listed(pairs)
    call = wire.resolve("permute", group, lambda: describe(x, dim, pairs=listed, dim=dim))
    stop = check_grad(call, grad)
    to = _destinations("permute", call, listed)
    leaves, partition = held_pieces(call, x, dim, sizes, root=_number(to))
    call = named(call, leaves)
    return leaves.run_parts(
        partition,
        lambda part: permute_pair(call, part, *to),
        stop=stop,
        async_op=async_op,
    )


@overload
def shift(
    x: Nest,
    offset: int = ...,
    *,
    wrap: bool = ...,
    dim: int = ...,
    sizes: Sizes = ...,
    group: GroupLike = ...,
    grad: SumOrNone = ...,
    async_op: Literal[False] = ...,
) -> Nest: ...
@overload
def shift(
    x: Nest,
    offset: int = ...,
    *,
    wrap: bool = ...,
    dim: int = ...,
    sizes: Sizes = ...,
    group: GroupLike = ...,
    grad: SumOrNone = ...,
    async_op: Literal[True],
) -> Handle[Nest]: ...
def shift(
    x: Any,
    offset: int = 1,
    *,
    wrap: bool = True,
    dim: int = 0,
    sizes: Sizes = None,
    group: GroupLike = None,
    grad: SumOrNone = "sum",
    async_op: bool = False,
) -> Any:
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
    key = None
    if sizes is not None:
        key = ("shift", x, group, offset, wrap, dim, hashable(sizes), grad)
        plain = type(offset) is int and type(dim) is int and type(wrap) is bool
        known = recall(*key) if plain else None
        if known is not None:
            return run_known(known, x, grad, async_op)
    call = wire.resolve("shift", group, lambda: describe(x, dim, offset=offset, wrap=wrap, dim=dim))
    stop = check_grad(call, grad)
    check_bool(call, "wrap", wrap)
    by = as_index(offset)
    if by is None:
        problem = f"shift: offset={offset!r} is not a whole number.\nGive ranks to move on."
        refuse(call, InputError(problem))
    last = call.size - 1
    to = [
        (rank + by) % call.size if wrap or 0 <= rank + by <= last else -1
        for rank in range(call.size)
    ]
    leaves, partition = held_pieces(call, x, dim, sizes, "permute", _number(to))
    call = named(call, leaves)
    return leaves.run_parts(
        partition,
        lambda part: permute_pair(call, part, *to),
        stop=stop,
        async_op=async_op,
        key=key,
    )


def _listed(pairs: object) -> list[object]:
    """Pairs without arrays: ranks compare them in checked mode, and an iterator is used up once."""
    pairs = _without_arrays(pairs)
    return [_without_arrays(pair) for pair in pairs] if isinstance(pairs, Iterable) else [pairs]


def _without_arrays(value: object) -> object:
    if isinstance(value, tuple):
        return tuple([_without_arrays(item) for item in value])
    if isinstance(value, list):
        return [_without_arrays(item) for item in value]
    # TorchDynamo asks no number that varies from call to call.
    return value.tolist() if not isinstance(value, int) and hasattr(value, "tolist") else value


def _number(to: Sequence[int]) -> int:
    """Tells destinations from others, which the ranks compare. TorchDynamo 2.11 traces no ``hash``."""
    number = 0
    for end in to:
        number = (number * 1_000_003 + end + 2) % _PRIME
    return number


def _ends(call: Call, partition: Partition, *to: int) -> Ends:
    source = to.index(call.rank) if call.rank in to else call.rank
    return partition.lengths(call.rank), partition.lengths(source)


@makes_pair("permute", _ends)
def permute_pair(call: Call, partition: Partition, *destinations: int) -> AdjointPair:
    """Pieces from each rank to its destination, or nowhere if that is -1 <-> pieces back."""
    back = [-1] * call.size
    for rank, end in enumerate(destinations):
        if end >= 0:
            back[end] = rank
    arriving = (
        tuple(s[rank if source < 0 else source] for rank, source in enumerate(back))
        for s in partition.sizes
    )
    after = Partition(partition.dims, tuple(arriving))
    end, source = destinations[call.rank], back[call.rank]
    nobody = [0] * call.size

    def move(
        xs: Sequence[Tensor], end: int, source: int, partition: Partition, result: Partition
    ) -> list[Tensor]:
        send, receive = nobody.copy(), nobody.copy()
        if end >= 0:
            send[end] = partition.counts(xs)[call.rank]
        if source >= 0:
            receive[source] = result.counts(xs)[call.rank]
        sent = partition.pack_own(xs) if end >= 0 else partition.pack_none(xs)
        peers = [end] if end >= 0 else [], [source] if source >= 0 else []
        got = wire.all_to_all(call, sent, send, receive, peers=peers)
        shapes = result.shapes(xs, call.rank)
        return unpack(got, shapes) if source >= 0 else [got.new_zeros(s) for s in shapes]

    return AdjointPair(
        "permute",
        "permute",
        lambda xs: move(xs, end, source, partition, after),
        lambda xs: move(xs, source, end, after, partition),
        Made("permute", call, (partition, *destinations)),
    )


def _destinations(name: str, call: Call, pairs: Sequence[object]) -> list[int]:
    """Where each rank sends to; -1 for nowhere."""
    to = [-1] * call.size
    for entry in pairs:
        if not isinstance(entry, (tuple, list)) or len(entry) != 2:
            problem = f"{name}: {entry!r} is not a (from, to) pair.\nGive pairs of ranks."
            refuse(call, InputError(problem))
        a = check_rank(name, call, "from", entry[0])
        b = check_rank(name, call, "to", entry[1])
        if to[a] >= 0 or b in to:
            twice = f"rank {a} sends" if to[a] >= 0 else f"rank {b} receives"
            advice = "Give each rank at most one to send to and one to receive from."
            refuse(call, GroupError(f"{name}: {twice} twice.\n{advice}"))
        to[a] = b
    return to
