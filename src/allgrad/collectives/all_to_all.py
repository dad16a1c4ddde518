"""all_to_all: its own adjoint, with what is sent and what is received swapped."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from allgrad import wire
from allgrad.adjoint_pair import AdjointPair
from allgrad.collectives.arguments import (
    Sizes,
    announce,
    attempt,
    given_sizes,
    require_fit,
    shares,
    vector_at_least,
)
from allgrad.errors import InputError
from allgrad.ragged import join, lay_out
from allgrad.transforms import apply

if TYPE_CHECKING:
    from torch import Tensor

    from allgrad.wire import Group, GroupLike

__all__ = ["all_to_all", "exchange_pair"]


def all_to_all(
    x: Tensor,
    dim: int = 0,
    *,
    send_sizes: Sizes = None,
    recv_sizes: Sizes = None,
    group: GroupLike = None,
) -> Tensor:
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
    ranks = wire.resolve("all_to_all", group)
    if isinstance(send_sizes, str) and recv_sizes is None:
        recv_sizes = send_sizes

    def check() -> tuple[Tensor, int, tuple[int, ...], tuple[int, ...] | None]:
        tensor, axis = vector_at_least("all_to_all", x, dim)
        send = shares("all_to_all", ranks, tensor.shape[axis], send_sizes, "send_sizes")
        if recv_sizes is None:
            return tensor, axis, send, None
        if isinstance(recv_sizes, str) and recv_sizes == "equal":
            return tensor, axis, send, (send[ranks.rank],) * ranks.size
        return tensor, axis, send, given_sizes("all_to_all", ranks, recv_sizes, "recv_sizes")

    checked = attempt(check, others_wait=recv_sizes is None and ranks.size > 1)
    if isinstance(checked, InputError):
        announce("all_to_all", ranks, x, checked)
    assert not isinstance(checked, InputError)
    tensor, axis, send, receive = checked
    if receive is None:
        heard = announce("all_to_all", ranks, tensor, axis, send)
        require_fit("all_to_all", heard, axis)
        receive = tuple(a.count for a in heard)
    return apply(exchange_pair(ranks, send, receive, axis), tensor)


def exchange_pair(
    ranks: Group, send: tuple[int, ...], receive: tuple[int, ...], dim: int
) -> AdjointPair:
    """Blocks of ``send`` sizes out, blocks of ``receive`` sizes in; swapped in the adjoint."""

    def exchange(x: Tensor, out: tuple[int, ...], into: tuple[int, ...]) -> Tensor:
        others = prod(x.shape[:dim]) * prod(x.shape[dim + 1 :])
        flat = wire.all_to_all(
            ranks,
            lay_out(x, out, dim),
            [size * others for size in out],
            [size * others for size in into],
        )
        return join(flat, x.shape, into, dim)

    return AdjointPair(
        "all_to_all",
        "all_to_all",
        lambda x: exchange(x, send, receive),
        lambda x: exchange(x, receive, send),
    )
