"""Accumulators for the gradients of the keys of all ranks, in the message that carries them."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from allgrad._autograd.async_calls import DoneHandle
from allgrad.collectives.all_gather import reduce_scatter

if TYPE_CHECKING:
    from torch import Tensor

    from allgrad._autograd.async_calls import Handle
    from allgrad.losses._pairs.key_blocks import KeyLayout

__all__ = ["KeySums"]

OVERLAPS_FROM = 2**18  # bytes; for fewer, starting a thread takes longer than the transfer
ONE_PRODUCT_UP_TO = 2**21  # elements; of more, a rank's block at a time, which takes less memory


class KeySums:
    """Accumulators for the keys of all ranks, in the message of ``reduce_sums``, which saves a copy of them.

    rank 0   [ a0 a0 t0 | b0 t0 | c0 t0 ]      blocks: a0 a0, b0 and c0
    """

    def __init__(self, layout: KeyLayout, width: int, like: Tensor) -> None:
        self.layout, self.width = layout, width
        self.counts = tuple(size * width + 1 for size in layout.sizes)
        self.starts = (0, *accumulate(self.counts))
        self.message = like.new_empty(self.starts[-1])
        self.rows = self.message.view(layout.world, -1) if layout.is_equal else None
        self.is_empty = True
        self.own_term: Tensor
        self.received: Handle[Tensor]

    def block(self, rank: int) -> Tensor:
        """The sums for one rank's keys."""
        start, size = self.starts[rank], self.layout.sizes[rank]
        return self.message[start : start + size * self.width].view(size, self.width)

    def blocks(self) -> list[Tensor]:
        return [self.block(rank) for rank in range(self.layout.world)]

    def add_product(self, weights: Tensor, own: Tensor, gain: Tensor) -> None:
        """Add ``gain * weights.T @ own``; weights have a column for each key of all ranks."""
        sizes = self.layout.sizes
        if self.is_empty and sum(sizes) * self.width <= ONE_PRODUCT_UP_TO:
            # Multiplied by a number, one of a narrower dtype would be rounded once more.
            product = torch.mm(weights.T, own).to(self.message.dtype)
            if self.rows is not None:
                torch.mul(product.view(len(sizes), -1), gain, out=self.rows[:, :-1])
            else:
                for block, part in zip(self.blocks(), product.split(sizes), strict=True):
                    torch.mul(part, gain, out=block)
        else:
            if self.is_empty:
                self.message.zero_()
            narrow = own.dtype != self.message.dtype
            scaled = own if narrow else own * gain
            for block, columns in zip(self.blocks(), weights.split(sizes, 1), strict=True):
                if narrow:
                    block.addcmul_(torch.mm(columns.T, own), gain)
                else:
                    block.addmm_(columns.T, scaled)
        self.is_empty = False

    def start(self, own_term: Tensor, *, overlaps: bool) -> None:
        """Send all sums, and a number of this rank; with ``overlaps`` there is work while they travel."""
        if self.rows is not None:
            self.rows[:, -1] = own_term
        else:
            for part in self.message.split(self.counts):
                part[-1] = own_term
        self.own_term, group = own_term, self.layout.group
        if self.layout.world > 1:
            if overlaps and self.message.nbytes >= OVERLAPS_FROM:
                self.received = reduce_scatter(
                    self.message, sizes=self.counts, group=group, grad="none", async_op=True
                )
            else:
                self.received = DoneHandle(
                    reduce_scatter(self.message, sizes=self.counts, group=group, grad="none")
                )

    def wait(self) -> tuple[Tensor, Tensor]:
        """The sums over ranks for this rank's keys, and that of all ranks' numbers."""
        if self.layout.world == 1:
            return self.block(0), self.own_term
        received = self.received.wait()
        return received[:-1].view(self.layout.sizes[self.layout.rank], self.width), received[-1]
