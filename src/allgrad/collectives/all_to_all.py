"""all_to_all: its own adjoint, with what is sent and what is received swapped."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from allgrad._autograd.adjoint_pair import AdjointPair, makes_pair
from allgrad._autograd.transforms import apply
from allgrad._core.partition import Cut, plain
from allgrad._wire import primitives as wire
from allgrad.collectives._inputs import (
    Nest,
    Sizes,
    Taken,
    announce,
    attempt,
    given_sizes,
    shapes,
    shares,
    take,
    way_to_run,
)
from allgrad.collectives._pair_cache import frozen, recall, remember
from allgrad.collectives._size_exchange import arriving_sizes
from allgrad.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from allgrad._wire.primitives import Group, GroupLike

__all__ = ["all_to_all", "exchange_pair"]


def all_to_all(
    x: Nest,
    dim: int = 0,
    *,
    send_sizes: Sizes = None,
    recv_sizes: Sizes = None,
    group: GroupLike = None,
    async_op: bool = False,
) -> Nest:
    """Send block ``r`` of ``x`` to rank ``r``; join what arrives in rank order.

        rank 0   [ a0 | a1 a1 | a2 ]         [ a0 | b0 b0 | c0 ]
        rank 1   [ b0 b0 | b1 | b2 ]   --->  [ a1 a1 | b1 | c1 ]
        rank 2   [ c0 | c1 | c2 c2 ]         [ a2 | b2 | c2 c2 ]

    Gradient: ``all_to_all`` the other way, each block back to where it came from.

    ``send_sizes=None`` cuts as evenly as possible, the first ranks getting one more;
    ``recv_sizes=None`` finds out what arrives. ``send_sizes="equal"`` promises that all blocks
    between all ranks have one size.

    Cost: one collective each way, plus one size exchange unless ``recv_sizes`` is given.
    """
    if isinstance(send_sizes, str) and recv_sizes is None:
        recv_sizes = send_sizes
    sizes: tuple[object, object] = send_sizes, recv_sizes
    if not isinstance(recv_sizes, str):
        sizes = frozen(send_sizes), frozen(recv_sizes)
    given = ("all_to_all", x, group, dim, *sizes)
    known = None if async_op or recv_sizes is None else recall(*given)
    if known is not None:
        return apply(known, (x,))[0]  # type: ignore[arg-type, return-value]
    ranks = wire.resolve("all_to_all", group, lambda: f"dim={dim}, {shapes(x, dim)}")

    def check() -> tuple[Taken[Nest], Cut, Cut | None]:
        taken = take("all_to_all", x)
        dims = taken.dims("all_to_all", dim)
        taken = taken.at_least_vectors()
        lengths = [t.shape[axis] for t, axis in zip(taken.tensors, dims, strict=True)]
        send = [shares("all_to_all", ranks, n, send_sizes, "send_sizes") for n in lengths]
        if recv_sizes is None:
            alone = ranks.size == 1
            return taken, Cut(dims, tuple(send)), Cut(dims, tuple(send)) if alone else None
        if isinstance(recv_sizes, str) and recv_sizes == "equal":
            receive = [(sizes[ranks.rank],) * ranks.size for sizes in send]
        else:
            given = given_sizes("all_to_all", ranks, recv_sizes, "recv_sizes")
            receive = [given for _ in lengths]
        return taken, Cut(dims, tuple(send)), Cut(dims, tuple(receive))

    checked = attempt(check, others_wait=recv_sizes is None and ranks.size > 1)
    if isinstance(checked, InputError):
        raise announce("all_to_all", ranks, x, checked)
    taken, send, receive = checked
    if receive is None:
        receive = arriving_sizes(ranks, taken, send)
    into = receive

    equal = isinstance(send_sizes, str) and isinstance(recv_sizes, str)

    def run(which: list[int], xs: list[Tensor]) -> Any:
        pair = exchange_pair(ranks, send.of(which), into.of(which), equal)
        if recv_sizes is not None and xs[0] is x:  # not a vector made of a single number
            remember(pair, *given)
        return way_to_run(async_op)(pair, xs)

    return taken.run(run, async_op=async_op)


@makes_pair("all_to_all", lambda _, send, receive, *__: (send.totals(), receive.totals()))
def exchange_pair(ranks: Group, send: Cut, receive: Cut, equal: bool = False) -> AdjointPair:
    """Blocks of ``send`` sizes out, blocks of ``receive`` sizes in; swapped in the adjoint.

    ``equal`` tells that all blocks between all ranks have one size.
    """
    return AdjointPair(
        "all_to_all",
        "all_to_all",
        partial(_exchange, ranks, send, receive, bool(equal)),
        partial(_exchange, ranks, receive, send, bool(equal)),
    )


def _exchange(
    ranks: Group, send: Cut, receive: Cut, equal: bool, xs: Sequence[Tensor]
) -> list[Tensor]:
    if send.by_rows(xs):  # asked once: of a small call, asking takes longer than all else
        sizes = send.sizes[0], receive.sizes[0]
        return [wire.all_to_all(ranks, plain(xs[0]), *sizes, equal=equal)]
    counts = send.counts(xs), receive.counts(xs)
    return receive.join(wire.all_to_all(ranks, send.lay_out(xs), *counts, equal=equal), xs)
