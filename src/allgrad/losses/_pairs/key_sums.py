"""Accumulators for the gradients of the keys of all ranks, in the message that carries them."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from allgrad._autograd.async_calls import DoneHandle
from allgrad.collectives.all_gather import reduce_scatter

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

    rank 0   [ a0 t0 | b0 t0 | c0 t0 ]
             [ a0    |       | c0    ]
             [       |       | c0    ]

    A key's sums have one element more than its width, of which the first of a rank carries the number;
    the block of a rank without keys is that number alone. So one product gives the sums for all keys in
    the message itself, if every rank has some.
    """

    def __init__(self, layout: KeyLayout, width: int, like: Tensor) -> None:
        self.layout, self.width = layout, width
        self.counts = tuple(max(1, size * (width + 1)) for size in layout.sizes)
        self.starts = (0, *accumulate(self.counts))
        self.message = like.new_empty(self.starts[-1])
        self.joined: Tensor | None = None
        if 0 in layout.sizes:
            self.message.zero_()
        else:
            rows = self.message.view(-1, width + 1)
            rows[:, width:].zero_()
            self.joined = rows[:, :width]
        self.is_empty = True
        self.own_term: Tensor
        self.received: Handle[Tensor]

    def block(self, rank: int) -> Tensor:
        """The sums for one rank's keys."""
        return self._sums(self.message[self.starts[rank] : self.starts[rank + 1]], rank)

    def blocks(self) -> list[Tensor]:
        return [self.block(rank) for rank in range(self.layout.world)]

    def _sums(self, part: Tensor, rank: int) -> Tensor:
        size = self.layout.sizes[rank]
        return part[: size * (self.width + 1)].view(size, self.width + 1)[:, : self.width]

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
        if layout.is_equal and self.joined is not None:
            self.message.view(layout.world, -1)[:, self.width] = own_term
        else:
            for part in self.message.split(self.counts):
                part[self._place(part)] = own_term
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
        rank = self.layout.rank
        if self.layout.world == 1:
            return self.block(rank), self.own_term
        received = self.received.wait()
        return self._sums(received, rank), received[self._place(received)]

    def _place(self, part: Tensor) -> int:
        """Where the number is in the part of the message for one rank."""
        return min(self.width, len(part) - 1)
