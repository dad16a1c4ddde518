"""The way of tokens to the experts of all ranks, and back: one linear map and its adjoint."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from allgrad._autograd.adjoint_pair import AdjointPair, Made
from allgrad._wire import primitives as wire
from allgrad._wire.primitives import Parts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from allgrad._wire.primitives import Call
    from allgrad.nn._first_message import Arrived
    from allgrad.nn._ranks import Place

__all__ = ["Counts", "Route"]

Counts: TypeAlias = (
    "np.ndarray[tuple[int, int], np.dtype[np.int64]]"  # on the host, by rank and expert
)


class Route:
    """Which tokens of this rank go where, in three steps that are each other's adjoint both ways.

        spread     tokens                           <->   slots: choices that are sent, by expert
        exchange   slots, by rank and its expert    <->   rows at the own experts, by rank
        regroup    rows by rank and expert          <->   rows by expert and rank

    Large blocks travel each to its place, and are not regrouped. Every step looks rows up; adding
    rows by index would take them one after another.
    """

    def __init__(
        self,
        slots: Tensor,
        shape: tuple[int, int],
        kept: Counts,
        held: Sequence[int],
        place: Place,
    ) -> None:
        """``shape``: tokens and choices of each. ``kept``: what every rank sends to every expert."""
        self.arrived: Arrived | None = (
            None  # rows that came with the counts, for one use of the map
        )
        self.slots, self.place, self.held = slots, place, tuple(held)
        self.tokens, self.choices = shape
        ends = list(accumulate(held, initial=0))
        self.experts = range(ends[place.rank], ends[place.rank + 1])
        self.sent, self.own = kept[place.rank], kept[:, self.experts.start : self.experts.stop]
        upto = list(accumulate(self.sent.tolist(), initial=0))
        self.send = tuple([upto[b] - upto[a] for a, b in pairwise(ends)])
        self.receive = tuple(self.own.sum(1).tolist())
        self.counts = tuple(self.own.sum(0).tolist())
        self.mean_part = int(kept.sum()) / max(1, kept.size)
        self._rows = slots // self.choices if self.choices > 1 else slots
        self._at: Tensor | None = None
        self._unsent: Tensor | None = None
        # Where rows by expert and rank stand among those by rank and expert, as an array.
        self._there: Any = None
        self._orders: tuple[Tensor, Tensor] | None = None
        self._parts: tuple[Parts, Parts] | None = None

    def pair(self, call: Call) -> AdjointPair:
        """Tokens <-> rows at the own experts, by expert and then by rank."""

        def there(xs: Sequence[Tensor]) -> list[Tensor]:
            if self.arrived is not None:
                arrived, self.arrived = self.arrived, None
                return [self._by_expert(arrived)]
            return [self._exchange(call, self._to_slots(x)) for x in xs]

        def back(ys: Sequence[Tensor]) -> list[Tensor]:
            return [self._to_tokens(self._exchange_back(call, y)) for y in ys]

        return AdjointPair("dispatch", "combine", there, back, Made("dispatch", call, ()))

    def exchange_pair(self, call: Call) -> AdjointPair:
        """Slots <-> rows at the own experts."""
        return AdjointPair(
            "dispatch",
            "combine",
            lambda xs: [self._exchange(call, x) for x in xs],
            lambda ys: [self._exchange_back(call, y) for y in ys],
            Made("dispatch", call, ()),
        )

    def spread_pair(self) -> AdjointPair:
        """Tokens <-> slots, on this rank."""
        return AdjointPair(
            "dispatch",
            "combine",
            lambda xs: [self._to_slots(x) for x in xs],
            lambda ys: [self._to_tokens(y) for y in ys],
        )

    def _to_slots(self, x: Tensor) -> Tensor:
        return x.index_select(0, self._rows)

    def _to_tokens(self, y: Tensor) -> Tensor:
        """The sum of its slots to each token."""
        sent = self.slots.shape[0]
        if not sent:
            return y.new_zeros(self.tokens, *y.shape[1:])
        if self._at is None:
            number, slots = self.tokens * self.choices, self.slots
            at = slots.new_zeros(number)
            self._at = at.index_copy_(0, slots, torch.arange(sent, device=slots.device))
            if sent < number:  # dropped, or routed nowhere
                unsent = torch.ones_like(at, dtype=torch.bool)
                self._unsent = unsent.index_fill_(0, slots, False)
        found = y.index_select(0, self._at)
        if self._unsent is not None:
            found = found.masked_fill_(self._unsent.view(-1, *[1] * (y.dim() - 1)), 0)
        if self.choices == 1:
            return found
        return found.view(self.tokens, self.choices, *y.shape[1:]).sum(1)

    def _exchange(self, call: Call, x: Tensor) -> Tensor:
        if call.size == 1:
            return x
        if self._in_parts(call, x):
            return wire.all_to_all(call, x, self.send, self.receive, parts=self._layouts())
        y = wire.all_to_all(call, x, self.send, self.receive)
        return y.index_select(0, self._order(x)[0]) if self._mixed else y

    def _exchange_back(self, call: Call, y: Tensor) -> Tensor:
        if call.size == 1:
            return y
        if self._in_parts(call, y):
            parts = self._layouts()[::-1]
            return wire.all_to_all(call, y, self.receive, self.send, parts=parts)
        x = y.index_select(0, self._order(y)[1]) if self._mixed else y
        return wire.all_to_all(call, x, self.receive, self.send)

    def _in_parts(self, call: Call, x: Tensor) -> bool:
        """The same on every rank: all of them know how many rows go where."""
        return max(self.held) > 1 and wire.moves_parts(call, x, self.mean_part)

    @property
    def _mixed(self) -> bool:
        """Whether blocks by rank and blocks by expert stand in different orders."""
        return min(self.place.world, len(self.experts)) > 1

    def _by_expert(self, arrived: Arrived) -> Tensor:
        """Rows that came with the counts, in order of experts and ranks."""
        there, lengths = self._look_up(), self.own.T.ravel()
        before = np.cumsum((0, *self.receive[:-1]))
        apart = arrived.first - before + np.arange(0, len(before) * arrived.stride, arrived.stride)
        at = there + np.tile(apart, len(self.experts)).repeat(lengths)
        return arrived.rows.index_select(0, torch.from_numpy(at))

    def _look_up(self) -> Any:
        if self._there is None:
            self._there = _transposed_blocks(self.own)
        return self._there

    def _order(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Where rows in the order of experts are among those in the order of ranks, and the inverse."""
        if self._orders is None:
            there = self._look_up()
            back = np.empty_like(there)
            back[there] = np.arange(len(there))
            self._orders = (
                torch.from_numpy(there).to(x.device),
                torch.from_numpy(back).to(x.device),
            )
        return self._orders

    def _layouts(self) -> tuple[Parts, Parts]:
        if self._parts is None:
            world, own = range(self.place.world), range(len(self.experts))
            self._parts = (
                Parts(
                    tuple(self.sent.tolist()),
                    tuple(rank for rank in world for _ in range(self.held[rank])),
                    tuple(number for rank in world for number in range(self.held[rank])),
                ),
                Parts(
                    tuple(self.own.T.ravel().tolist()),
                    tuple(rank for _ in own for rank in world),
                    tuple(number for number in own for _ in world),
                ),
            )
        return self._parts


def _transposed_blocks(counts: Counts) -> Any:
    """Where the rows of blocks that stand by row of ``counts`` are to be found, by column."""
    flat = counts.ravel()
    starts = (flat.cumsum() - flat).reshape(counts.shape).T.ravel()
    lengths = counts.T.ravel()
    ends = lengths.cumsum()
    at = np.arange(ends[-1] if len(ends) else 0)
    at += (starts - ends + lengths).repeat(lengths)
    return at
