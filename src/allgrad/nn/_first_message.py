"""Rows that travel with the counts: one message for both, where a rank has few rows for each other.

    length, flag, what the rank tells of its arguments, its choices by expert | rows

The receiver knows neither the counts nor the length before: it receives into memory for the longest
message there can be. Where some rank has more rows, all of them tell their counts only.
"""

from __future__ import annotations

import weakref
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from allgrad._autograd.transforms import is_plain_autograd
from allgrad._wire import primitives as wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from allgrad._wire.groups import Group
    from allgrad._wire.primitives import Call

__all__ = ["MOST", "Arrived", "Row", "can_carry", "exchange"]

MOST = 128 * 1024  # bytes of a message
_WORDS = 2  # before the facts: the length of the message, and the flag
_ALIKE = slice(8 * 2, 8 * 8)  # bytes of the facts that are alike
# Flags: rows do not fit; they follow; they would have fitted, but did not last time on some rank.
_LONG, _FOLLOW, _HELD_BACK = 0, 1, 2
_LONG_LAST_TIME: weakref.WeakSet[Group] = weakref.WeakSet()

Array = Any  # np.ndarray; its type has as many parameters as this file has functions


class Row(NamedTuple):
    """What a rank tells: of its arguments, and how many choices fall on each expert.

    The first of the facts is 1 and the first six are alike on every rank, if all is well.
    """

    facts: tuple[int, ...]
    counts: list[int]


class Arrived(NamedTuple):
    """Rows of all ranks where they were received: memory, the first row, and how far ranks are apart."""

    rows: Tensor
    first: int
    stride: int


class _Memory(NamedTuple):
    """Where messages are received: as bytes, as what follows the head, by rank, and in numpy."""

    flat: Tensor
    recvs: tuple[Tensor, ...]
    heads: Array


# Kept by group, for the heads and widths met so far: rows are taken out before the next exchange.
_KEPT: weakref.WeakKeyDictionary[Group, dict[tuple[int, int, int], _Memory]] = (
    weakref.WeakKeyDictionary()
)
_MOST_KEPT = 4


def _memory(call: Call, length: int, before: int, by_rank: int) -> _Memory:
    kept = _KEPT.get(call.group)
    if kept is None:
        kept = _KEPT[call.group] = {}
    # Heads of several lengths may end at one place (test_layers_whose_messages_take_equal_memory).
    key = length, before, by_rank
    found = kept.get(key)
    if found is None:
        if len(kept) >= _MOST_KEPT:
            kept.clear()
        # Memory of inference mode could not be received into outside of it.
        with torch.inference_mode(False):
            flat = torch.empty((call.size, by_rank), dtype=torch.uint8, device="cpu")
            heads = flat.numpy()[:, before : before + length]
            found = kept[key] = _Memory(flat, flat[:, before:].unbind(), heads)
    return found


def exchange(
    call: Call, x: Tensor, row: Row, chosen: tuple[Array, Sequence[int]] | None
) -> tuple[list[list[int]] | None, Array, Arrived | None]:
    """The facts of all ranks where they differ, their counts, and the rows if those of all came along.

    ``chosen``: rows of ``x`` by the rank they go to, and where those of each rank end, from 0 on.
    Without them, or where they are many, this rank sends counts only. Counts are good where the facts
    of all ranks are.
    """
    head, width, flag = np.array([0, _LONG, *row.facts, *row.counts]), 1, _LONG
    length = head.nbytes
    if chosen is not None:
        width = x.shape[1] * x.element_size()
        if max(b - a for a, b in pairwise(chosen[1])) * width + length <= MOST:
            flag = _HELD_BACK if _LONG_LAST_TIME and call.group in _LONG_LAST_TIME else _FOLLOW
            head[1] = flag
    above = -(-length // width)  # rows of memory that the head takes, which ends where rows begin
    if flag == _FOLLOW and chosen is not None and chosen[1][-1]:
        sent, sends = _pack(x, head, above, *chosen)
    else:
        head[0] = length
        sent = torch.from_numpy(head.view(np.uint8))
        sends = [sent] * call.size
    stride, before = -(-MOST // width) + above, above * width - length
    memory = _memory(call, length, before, stride * width)
    wire.all_to_all_unsized(call, sent, sends, memory.recvs)
    heads = memory.heads.tobytes()
    table = np.frombuffer(heads, np.int64).reshape(call.size, -1)
    flags = table[:, 1].tolist()
    if _LONG in flags:
        _LONG_LAST_TIME.add(call.group)
    elif _HELD_BACK in flags:
        _LONG_LAST_TIME.discard(call.group)
    own = heads[call.rank * length :][_ALIKE]
    alike = all(heads[at:][_ALIKE] == own for at in range(0, len(heads), length))
    last = _WORDS + len(row.facts)
    facts = None if alike and row.facts[0] == 1 else table[:, _WORDS:last].tolist()
    if chosen is None or flags.count(_FOLLOW) < call.size:
        return facts, table[:, last:], None
    rows = memory.flat.view(x.dtype).view(-1, x.shape[1])
    return facts, table[:, last:], Arrived(rows, above, stride)


def can_carry(x: Tensor, capacity: int | None) -> bool:
    """Tell whether rows of this rank may travel with the counts: what is dropped is not known yet."""
    plain = type(x) in {torch.Tensor, torch.nn.Parameter} and x.layout is torch.strided
    good = x.dim() == 2 and x.shape[1] > 0 and not (x.is_conj() or x.is_neg())
    return capacity is None and plain and good and is_plain_autograd()


def _pack(
    x: Tensor, head: Array, above: int, rows: Array, ends: Sequence[int]
) -> tuple[Tensor, list[Tensor]]:
    """A message for each rank, in one memory: looked up at once, with room for the heads."""
    width = x.shape[1] * x.element_size()
    at = np.zeros(ends[-1] + (len(ends) - 1) * above, np.int64)
    for rank, (a, b) in enumerate(pairwise(ends), 1):
        at[a + rank * above : b + rank * above] = rows[a:b]
    sent = x.detach().index_select(0, torch.from_numpy(at)).view(torch.uint8).view(-1)
    memory, start, sends = sent.numpy(), head.view(np.uint8), []
    for rank, (a, b) in enumerate(pairwise(ends), 1):
        middle, last = (a + rank * above) * width, (b + rank * above) * width
        first = middle - len(start)
        head[0] = last - first
        memory[first:middle] = start
        sends.append(sent[first:last])
    return sent, sends
