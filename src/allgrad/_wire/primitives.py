"""The only mover of bytes: plain tensors between ranks, over torch.distributed.

No gradients here. Every call takes contiguous memory, leaves it as it was, and returns new memory.
Counts by rank are lengths along the first dimension. Six calls are enough: whatever gathers,
scatters or permutes is an ``all_to_all`` with the right counts.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from allgrad._core import call_queue as departures
from allgrad._wire import eager as moves
from allgrad._wire.groups import Group, GroupLike, message_device, resolve

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

__all__ = [
    "Group",
    "GroupLike",
    "Planned",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "message_device",
    "overwrite",
    "reduce",
    "reduce_scatter",
    "resolve",
    "send_words",
    "watch",
]


class Planned(NamedTuple):
    """A call that is about to happen, as the ranks must agree on it."""

    op: str
    dtype: torch.dtype
    device: torch.device
    elements: int
    root: int = -1
    send: Sequence[int] = ()
    receive: Sequence[int] = ()


_watcher: Callable[[Group, Planned], AbstractContextManager[None]] | None = None


def watch(watcher: Callable[[Group, Planned], AbstractContextManager[None]] | None) -> None:
    """Have every call happen inside ``watcher(group, planned)``; ``None`` ends it."""
    global _watcher  # noqa: PLW0603
    _watcher = watcher


def all_reduce(group: Group, x: Tensor, *, scratch: bool = False) -> Tensor:
    """Sum over ranks, on every rank.

    ``scratch`` gives ``x`` away: the result may take its memory.
    """
    if _at_once(group):
        return moves.all_reduce(group, x, scratch)
    if group.size == 1:
        return x if scratch else x.clone()
    planned = Planned("all_reduce", x.dtype, x.device, x.numel())
    return _in_turn(group, planned, moves.all_reduce, x, scratch)


def broadcast(group: Group, x: Tensor, src: int) -> Tensor:
    """What ``src`` holds, on every rank."""
    if _at_once(group):
        return moves.broadcast(group, x, src)
    if group.size == 1:
        return x.clone()
    planned = Planned("broadcast", x.dtype, x.device, x.numel(), src)
    return _in_turn(group, planned, moves.broadcast, x, src)


def overwrite(group: Group, x: Tensor, src: int) -> Callable[[], None]:
    """Start to broadcast into ``x`` itself; what it gives waits for that. Others may start before.

    What ``x`` held is gone, except on ``src``.
    """
    if _watcher is None and departures.free():
        return moves.start_overwriting(group, x, src)
    planned = Planned("broadcast", x.dtype, x.device, x.numel(), src)
    _in_turn(group, planned, moves.overwrite, x, src)
    return lambda: None


def reduce(group: Group, x: Tensor, dst: int) -> Tensor:
    """Sum over ranks on ``dst``; zeros on the others."""
    if _at_once(group):
        return moves.reduce(group, x, dst)
    if group.size == 1:
        return x.clone()
    planned = Planned("reduce", x.dtype, x.device, x.numel(), dst)
    return _in_turn(group, planned, moves.reduce, x, dst)


def all_to_all(
    group: Group, x: Tensor, send: Sequence[int], receive: Sequence[int], *, equal: bool = False
) -> Tensor:
    """Block ``r`` of ``x`` to rank ``r``; the blocks received, in rank order.

    ``equal`` tells that all blocks between all ranks are known to have one size.
    """
    if _at_once(group):
        return moves.all_to_all(group, x, send, receive, equal)
    if group.size == 1:
        return x.clone()
    counts = _in_elements(x, send), _in_elements(x, receive)
    planned = Planned("all_to_all", x.dtype, x.device, 0, -1, *counts)
    return _in_turn(group, planned, moves.all_to_all, x, send, receive, equal)


def all_gather(group: Group, x: Tensor, counts: Sequence[int]) -> Tensor:
    """Every rank's block, in rank order, on every rank."""
    if _at_once(group):
        return moves.all_gather(group, x, counts)
    if group.size == 1:
        return x.clone()
    planned = Planned("all_gather", x.dtype, x.device, 0, -1, _in_elements(x, counts))
    return _in_turn(group, planned, moves.all_gather, x, counts)


def reduce_scatter(group: Group, x: Tensor, counts: Sequence[int]) -> Tensor:
    """Block ``r`` of ``x``, summed over ranks, on rank ``r``."""
    if _at_once(group):
        return moves.reduce_scatter(group, x, counts)
    if group.size == 1:
        return x.clone()
    planned = Planned("reduce_scatter", x.dtype, x.device, 0, -1, _in_elements(x, counts))
    return _in_turn(group, planned, moves.reduce_scatter, x, counts)


def send_words(
    group: Group,
    words: Sequence[int],
    send: Sequence[int],
    receive: Sequence[int],
    device: torch.device,
) -> list[int]:
    """Send whole numbers to every rank, unwatched, and hear theirs."""
    flat = torch.tensor(words, dtype=torch.int64, device=message_device(group, device))
    heard: list[int] = moves.all_to_all(group, flat, send, receive).tolist()
    return heard


def _in_elements(x: Tensor, counts: Sequence[int]) -> list[int]:
    """Counts as ranks compare them: pieces of other widths do not fit."""
    width = prod(x.shape[1:])
    return [count * width for count in counts]


def _at_once(group: Group) -> bool:
    """Nothing stands between the call and the backend: most calls, told in the shortest way."""
    return (
        _watcher is None and (not departures.LINE.waiting or departures.free()) and group.size > 1
    )


def _in_turn(group: Group, planned: Planned, move: Callable[..., Tensor], *args: Any) -> Tensor:
    """Make the call behind those that are under way, inside the watcher."""

    def watched() -> Tensor:
        if _watcher is None:
            return move(group, *args)
        with _watcher(group, planned):
            return move(group, *args)

    return departures.in_turn(watched)
