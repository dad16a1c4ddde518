"""scan: prefix sums over ranks <-> suffix sums."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from allgrad._autograd.adjoint_pair import AdjointPair, Made, makes_pair
from allgrad._autograd.transforms import apply
from allgrad._core import reductions
from allgrad._core.partition import Partition, pack_flat, unpack_like
from allgrad._wire import primitives as wire
from allgrad._wire.calls import of_stacked
from allgrad._wire.consistency import refuse
from allgrad._wire.situation import FLAT_PIECE
from allgrad.collectives._inputs import check_bool, check_grad, describe, named, take_reduced
from allgrad.collectives._size_exchange import await_others
from allgrad.collectives.all_gather import gather_pair
from allgrad.errors import ReductionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from allgrad._wire.calls import Call
    from allgrad.types import GroupLike, Handle, Nest, Op, SumOrNone

__all__ = ["scan"]


@overload
def scan(
    x: Nest,
    op: Op = ...,
    *,
    exclusive: bool = ...,
    group: GroupLike = ...,
    grad: SumOrNone = ...,
    async_op: Literal[False] = ...,
) -> Nest: ...
@overload
def scan(
    x: Nest,
    op: Op = ...,
    *,
    exclusive: bool = ...,
    group: GroupLike = ...,
    grad: SumOrNone = ...,
    async_op: Literal[True],
) -> Handle[Nest]: ...
def scan(
    x: Any,
    op: Op = "sum",
    *,
    exclusive: bool = False,
    group: GroupLike = None,
    grad: SumOrNone = "sum",
    async_op: bool = False,
) -> Any:
    """Reduce over this rank and those before it.

                                       exclusive=True
        rank 0   [ a ]         [ a ]       [ 0 ]
        rank 1   [ b ]   --->  [ a+b ]     [ a ]
        rank 2   [ c ]         [ a+b+c ]   [ a+b ]

    Gradient of a sum: the sum over this rank and those after it. The other reductions are
    differentiated as torch does it over the stacked pieces.

        rank 0   A+B+C         [ A ]
        rank 1   B+C     <---  [ B ]
        rank 2   C             [ C ]

    ``exclusive=True`` leaves the own piece out; rank 0 then gets the reduction of nothing: 0 for
    ``sum``, 1 for ``prod``, the lowest value for ``max`` and ``logsumexp``, the highest for
    ``min``.

    Cost: for ``sum`` and ``mean`` log2(ranks) messages of one piece each way; between hosts a piece
    crosses a link once for two hosts. The other reductions gather all pieces.
    """
    call = wire.resolve("scan", group, lambda: describe(x, op=op, exclusive=exclusive))
    stop = check_grad(call, grad)
    check_bool(call, "exclusive", exclusive)
    leaves, found = take_reduced(call, x, op)
    await_others(call, leaves)
    call = named(call, leaves)
    if exclusive and any(reduction.empty is None for reduction in found):
        problem = (
            f"scan: rank 0 would get the {found[0].name} of nothing.\n"
            "Use exclusive=False, or a sum divided by the rank where it is not 0."
        )
        refuse(call, ReductionError(problem))
    if all(reduction.name == "sum" for reduction in found):
        pair = _prefix_pair(call, exclusive)
        return leaves.run(lambda _: pair, stop=stop, async_op=async_op)
    return leaves.call_each(
        lambda numbers, xs: _scan(call, found[numbers[0]], xs, exclusive, stop=stop),
        async_op=async_op,
    )


def _scan(
    call: Call,
    reduction: reductions.Reduction,
    xs: Sequence[Tensor],
    exclusive: bool,
    *,
    stop: bool,
) -> list[Tensor]:
    if reduction.linear:  # the mean
        # A sum of float16 may be infinite where the mean is not; each rank divides by its own number.
        wide = [x.float() if x.dtype is torch.float16 else x for x in xs]
        sums = apply(_prefix_pair(call, exclusive), wide, stop=stop)
        return [(s / (call.rank + 1)).to(x.dtype) for s, x in zip(sums, xs, strict=True)]
    rows = Partition((0,) * len(xs), ((1,) * call.size,) * len(xs))
    gathered = apply(gather_pair(of_stacked(call), rows), [x.unsqueeze(0) for x in xs], stop=stop)
    upto = [t[: call.rank if exclusive else call.rank + 1] for t in gathered]
    return [reduction.stacked(t, 0) if t.shape[0] else _of_nothing(reduction, t) for t in upto]


def _of_nothing(reduction: reductions.Reduction, no_rows: Tensor) -> Tensor:
    assert reduction.empty is not None
    nothing = no_rows.new_full(no_rows.shape[1:], reduction.empty(no_rows.dtype))
    if no_rows.dtype == torch.bool:
        return nothing
    return nothing + reductions.zeros_of_no_rows(reduction, no_rows)


@makes_pair("scan")
def _prefix_pair(call: Call, exclusive: bool) -> AdjointPair:
    def sums(xs: Sequence[Tensor], step: int) -> list[Tensor]:
        return unpack_like(_prefix(call, pack_flat(xs), step, exclusive), xs)

    made = Made("scan", call, (exclusive,))
    return AdjointPair("scan", "suffix scan", lambda xs: sums(xs, 1), lambda xs: sums(xs, -1), made)


def _prefix(call: Call, flat: Tensor, step: int, exclusive: bool) -> Tensor:
    """Sum what this rank and ranks ``- step, - 2 step, ...`` hold.

    On several hosts each sums up its own ranks, and a host's sum crosses a link once for each doubling
    of the distance in hosts:

        host a   [ a ]  [ a+b ]  ---.           [ a ]      [ a+b ]
        host b   [ c ]  [ c+d ]  <--' a+b       [ a+b+c ]  [ a+b+c+d ]
    """
    hosts = _chains(call, flat)
    own = next(ranks for ranks in hosts if call.rank in ranks)
    total = _along(call, flat, own, step, max(map(len, hosts)), exclusive)
    if len(hosts) == 1:
        return total
    forward = step > 0
    ends = tuple(ranks[-1 if forward else 0] for ranks in hosts)
    sums = total + flat if exclusive else total  # of the whole host, on its end
    before = _along(call, sums, ends, step, len(ends), exclusive=True)
    end = own[-1 if forward else 0]
    others = tuple(rank for rank in own if rank != end)
    if own is hosts[0 if forward else -1]:  # no host is before it
        _send(call, flat, (), None)
    elif call.rank == end:
        _send(call, before, others, None)
        total += before
    else:
        total += _send(call, flat, (), end)
    return total


def _chains(call: Call, flat: Tensor) -> tuple[tuple[int, ...], ...]:
    """The ranks of each host, if these are consecutive and the piece is large; otherwise all ranks as one.

    Hosts are found out in the first message of a group, on which the ranks must agree before.
    """
    topology = call.group.topology
    if (
        topology is not None
        and len(topology.hosts) > 1
        and topology.consecutive
        and flat.is_cpu
        and flat.nbytes > FLAT_PIECE
    ):
        return topology.hosts
    return (tuple(range(call.size)),)


def _along(  # noqa: PLR0917
    call: Call, flat: Tensor, ranks: tuple[int, ...], step: int, longest: int, exclusive: bool
) -> Tensor:
    """Prefix sums along these ranks, by doubling the distance; every rank takes as many steps."""
    at = ranks.index(call.rank) if call.rank in ranks else None

    def from_distance(x: Tensor, distance: int) -> Tensor:
        if at is None:
            return _send(call, x, (), None)
        to, source = at + step * distance, at - step * distance
        there = range(len(ranks))
        return _send(
            call,
            x,
            (ranks[to],) if to in there else (),
            ranks[source] if source in there else None,
        )

    total = from_distance(flat, 1) if exclusive else flat.clone()
    distance = 1
    while distance < longest - exclusive:
        total += from_distance(total, distance)
        distance *= 2
    return total


def _send(call: Call, flat: Tensor, to: tuple[int, ...], source: int | None) -> Tensor:
    """Send these ranks ``flat``; what ``source`` sends this one, or zeros."""
    n = flat.numel()
    if call.size == 1:
        return flat.new_zeros(n)
    send = [n if rank in to else 0 for rank in range(call.size)]
    receive = [n if rank == source else 0 for rank in range(call.size)]
    sent = flat.repeat(len(to)) if len(to) != 1 else flat
    peers = to, () if source is None else (source,)
    got = wire.all_to_all(call, sent, send, receive, peers=peers)
    return flat.new_zeros(n) if source is None else got
