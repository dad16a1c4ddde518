"""Accumulators for the gradients of the keys of all ranks, in the message that carries them."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from allgrad._autograd.async_calls import DoneHandle
from allgrad.collectives.all_gather import reduce_scatter
from allgrad.collectives.all_reduce import all_reduce
from allgrad.losses._pairs.key_blocks import MOST_PLACES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from allgrad._autograd.async_calls import Handle
    from allgrad.losses._pairs.key_blocks import KeyLayout

__all__ = ["KeySums"]

OVERLAPS_FROM = 2**20  # bytes; for fewer, starting a thread takes longer than the transfer
# Elements of 16 bits that one product gives; of more, a rank's block at a time takes less memory.
ONE_PRODUCT_UP_TO = 2**21


class KeySums:
    """Sums for all keys, and a number of each rank, which travel to the ranks that hold the keys.

    rank 1   [ a1 .  | b1 .  | c1 .  ]
             [ a1 t1 |    t1 | c1 t1 ]
             [     . |     . | c1 .  ]

    A key's sums have one element more than its width. These elements, and more where a rank has fewer
    keys than there are ranks, are places for the numbers of all ranks: so every rank adds them in rank
    order, to the same bits. One product gives the sums for all keys in the message itself, if every rank
    has as many keys.
    """

    def __init__(self, layout: KeyLayout, width: int, like: Tensor) -> None:
        self.layout, self.width = layout, width
        self.places = layout.world if layout.world <= MOST_PLACES else 0
        each, fewest = width + 1, max(1, self.places)
        self.counts = tuple(size * each + max(0, self.places - size) for size in layout.sizes)
        self.starts = (0, *accumulate(self.counts))
        self.message = like.new_empty(self.starts[-1])
        self.joined: Tensor | None = None
        if min(layout.sizes) < fewest:
            self.message.zero_()
        else:
            rows = self.message.view(-1, each)
            rows[:, width:].zero_()
            self.joined = rows[:, :width]
        self.is_empty = True
        self.received: Handle[Tensor]

    def block(self, rank: int) -> Tensor:
        """The sums for one rank's keys."""
        return self._sums(self.message[self.starts[rank] : self.starts[rank + 1]], rank)

    def blocks(self) -> list[Tensor]:
        return [self.block(rank) for rank in range(self.layout.world)]

    def _rows(self, part: Tensor, rank: int) -> Tensor:
        size, each = self.layout.sizes[rank], self.width + 1
        return part[: size * each].view(size, each)

    def _sums(self, part: Tensor, rank: int) -> Tensor:
        return self._rows(part, rank)[:, : self.width]

    def add_product(self, weights: Tensor, own: Tensor) -> None:
        """Add ``weights.T @ own``; weights have a column for each key of all ranks."""
        narrow = own.dtype != self.message.dtype
        for sums, columns in self._parts(weights, narrow):
            if narrow and self.is_empty:
                sums.copy_(torch.mm(columns.T, own))
            elif narrow:
                sums.add_(torch.mm(columns.T, own))
            elif self.is_empty:
                torch.mm(columns.T, own, out=sums)
            else:
                sums.addmm_(columns.T, own)
        self.is_empty = False

    def _parts(self, weights: Tensor, narrow: bool) -> Iterable[tuple[Tensor, Tensor]]:
        """The sums that one product gives, with their columns."""
        is_large = narrow and weights.shape[1] * self.width > ONE_PRODUCT_UP_TO
        if self.joined is not None and not is_large:
            return ((self.joined, weights),)
        return zip(self.blocks(), weights.split(self.layout.sizes, 1), strict=True)

    def start(self, own_term: Tensor, *, overlaps: bool) -> None:
        """Send all sums, and a number of this rank; with ``overlaps`` there is work while they travel."""
        self.own_term, layout = own_term, self.layout
        if layout.world == 1:
            return
        if self.places and layout.is_equal:
            self.message.view(layout.world, -1)[:, self._place(layout.sizes[0])] = own_term
        elif self.places:
            for part, size in zip(self.message.split(self.counts), layout.sizes, strict=True):
                part[self._place(size)] = own_term
        if overlaps and self.message.nbytes >= OVERLAPS_FROM:
            self.received = reduce_scatter(
                self.message, sizes=self.counts, group=layout.group, grad="none", async_op=True
            )
        else:
            self.received = DoneHandle(
                reduce_scatter(self.message, sizes=self.counts, group=layout.group, grad="none")
            )

    def wait(self) -> tuple[Tensor, Tensor]:
        """The sums over ranks for this rank's keys, and that of all ranks' numbers."""
        layout, rank = self.layout, self.layout.rank
        if layout.world == 1:
            return self.block(rank), self.own_term
        received = self.received.wait()
        rows = self._rows(received, rank)
        if not self.places:
            total = all_reduce(self.own_term, group=layout.group, grad="none")
        else:
            total = torch.cat((rows[: self.places, self.width], received[rows.numel() :])).sum()
        return rows[:, : self.width], total

    def _place(self, size: int) -> int:
        """Where this rank's number is in the part of the message for a rank of so many keys."""
        rank, each = self.layout.rank, self.width + 1
        return rank * each + self.width if rank < size else size * each + rank - size
