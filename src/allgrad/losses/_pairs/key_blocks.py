"""The keys of all ranks, in blocks: one gathered block, or one block per rank passed around a ring."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from allgrad.collectives.all_gather import reduce_scatter
from allgrad.collectives.permute import shift
from allgrad.losses._arguments.packed import gather_rows
from allgrad.losses._tiles.accumulators import (
    accumulator_dtype,
    accumulator_zeros,
    scale_and_cast,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeAlias

    from torch import Tensor
    from torch.cuda import Stream

    from allgrad.losses._arguments.agreement import Agreement
    from allgrad.types import GroupLike

    AddBlock: TypeAlias = Callable[["KeyBlock", list[Tensor]], None]

# Of so many ranks a number of each has a place of its own in a message that is added up; that is
# quadratic in the ranks.
MOST_PLACES = 64

__all__ = [
    "MOST_PLACES",
    "GatheredKeys",
    "KeyBlock",
    "KeyLayout",
    "RingKeys",
    "key_blocks",
    "needs_ring",
]


class KeyBlock(NamedTuple):
    """Some of the joined keys, from ``start`` on. Key ``first_pair`` of the block is query 0's pair.

    ``first_pair`` is None if the block contains no key of this rank's queries.
    """

    step: int
    k: Tensor
    start: int
    first_pair: int | None

    @property
    def columns(self) -> slice:
        return slice(self.start, self.start + len(self.k))


@dataclass(frozen=True, slots=True)
class KeyLayout:
    """How many keys each rank of the group holds, and which rank this is."""

    rank: int
    sizes: tuple[int, ...]
    group: GroupLike

    @property
    def world(self) -> int:
        return len(self.sizes)

    @property
    def start(self) -> int:
        """Where this rank's keys begin among the joined keys."""
        return sum(self.sizes[: self.rank])

    @property
    def is_equal(self) -> bool:
        return self.sizes.count(self.sizes[0]) == len(self.sizes)


def key_blocks(
    layout: KeyLayout,
    k: Tensor,
    *,
    ring: bool,
    joined: Tensor | None = None,
    agreed: Agreement | None = None,
) -> GatheredKeys | RingKeys:
    """The keys of all ranks, gathered or around a ring; ``joined`` were gathered before.

    The row of an agreement travels with those that are gathered; in a ring no call is expected.
    """
    if not ring:
        return GatheredKeys(layout, k, joined, agreed)
    if agreed is not None:
        agreed.confirm(None)
    return RingKeys(layout, k)


def needs_ring(layout: KeyLayout, k: Tensor, budget: int, ring: bool | None) -> bool:
    """Whether the keys must go around a ring.

    That is if the joined keys, the accumulators of their gradients and the message of these do not
    fit into ``budget`` bytes, unless the caller has chosen.
    """
    if layout.world == 1:
        return False
    row_bytes = k.shape[1] * (k.dtype.itemsize + 2 * accumulator_dtype(k.dtype).itemsize)
    return sum(layout.sizes) * row_bytes > budget if ring is None else ring


class GatheredKeys:
    """Every rank holds all keys, as one block.

    rank 0   [ a a ]              [ a a | b | c c c ]
    rank 1   [ b ]       --->     [ a a | b | c c c ]
    rank 2   [ c c c ]            [ a a | b | c c c ]
    """

    count = 1

    def __init__(
        self,
        layout: KeyLayout,
        k: Tensor,
        joined: Tensor | None = None,
        agreed: Agreement | None = None,
    ) -> None:
        self.layout = layout
        if joined is None:
            joined = k.contiguous()
            if layout.world > 1:
                joined = gather_rows(joined, layout.sizes, layout.group, agreed)
        self.block = KeyBlock(0, joined, 0, layout.start)

    def blocks(self) -> Iterator[KeyBlock]:
        yield self.block

    def gradients(
        self, add_block: AddBlock, gain: Tensor, dtype: torch.dtype, own_terms: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Let ``add_block`` fill accumulators for all keys; each rank gets its own, times ``gain``.

        ``own_terms`` are numbers of this rank, which ``add_block`` may still change. The sum of all
        ranks' travels in the same message and is the second result.
        """
        joined = self.block.k
        if self.layout.world == 1:
            parts = accumulator_zeros(joined, dtype)
            add_block(self.block, parts)
            own = scale_and_cast(parts, gain, dtype)
            return own, None if own_terms is None else own_terms.sum()
        sums = joined.new_zeros(joined.shape, dtype=accumulator_dtype(joined.dtype))
        add_block(self.block, [sums])
        own, total = reduce_sums(self.layout, sums.mul_(gain), own_terms)
        return own.to(dtype), total


def reduce_sums(
    layout: KeyLayout, sums: Tensor, own_terms: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Sum over ranks; each rank gets the rows of its own keys, and the sum of all ranks' terms.

    rank 0   [ a0 a0 t0 | b0 t0 | c0 t0 ]         [ a0+a1+a2  a0+a1+a2 ]   t0+t1+t2
    rank 1   [ a1 a1 t1 | b1 t1 | c1 t1 ]   --->  [ b0+b1+b2 ]             t0+t1+t2
    rank 2   [ a2 a2 t2 | b2 t2 | c2 t2 ]         [ c0+c1+c2 ]             t0+t1+t2

    A block is added up in an order of its own, so that the last bits of a sum of terms differ between
    ranks. Where they must not, each rank has a place for its term, and zeros for those of others.
    """
    group, width = layout.group, sums.shape[1]
    if own_terms is None:
        return reduce_scatter(sums, sizes=layout.sizes, group=group, grad="none"), None
    terms = own_terms.reshape(-1)
    counts = tuple(size * width + len(terms) for size in layout.sizes)
    if layout.is_equal:
        message = sums.new_empty(layout.world, counts[0])
        message[:, : -len(terms)] = sums.view(layout.world, -1)
        message[:, -len(terms) :] = terms
        message = message.view(-1)
    else:
        blocks = sums.split(layout.sizes)
        message = torch.cat([x for block in blocks for x in (block.flatten(), terms)])
    received = reduce_scatter(message, sizes=counts, group=group, grad="none")
    own = received[: -len(terms)].view(layout.sizes[layout.rank], width)
    return own, received[-len(terms) :].sum()


class RingKeys:
    """Every rank holds one piece at a time and passes it to the next rank.

    rank 0   [ a a ]         [ c c c ]         [ b ]
    rank 1   [ b ]     --->  [ a a ]     --->  [ c c c ]
    rank 2   [ c c c ]       [ b ]             [ a a ]

    The transfer of the next piece overlaps with the computation on this one
    (test_next_block_is_under_way_while_this_one_is_computed).
    """

    def __init__(self, layout: KeyLayout, k: Tensor) -> None:
        self.layout = layout
        self.own = k.contiguous()
        self.count = layout.world
        self.starts = list(accumulate(layout.sizes, initial=0))
        self.comm_stream = torch.cuda.Stream(k.device) if k.is_cuda else None

    def blocks(self) -> Iterator[KeyBlock]:
        k = self.own
        for step in range(self.count):
            wait = self._start_shift(step, k) if step + 1 < self.count else None
            yield self._block(step, k)
            if wait is not None:
                k = wait()

    def gradients(
        self, add_block: AddBlock, gain: Tensor, dtype: torch.dtype, own_terms: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Let ``add_block`` fill an accumulator for each block; each rank gets its own, times ``gain``.

        The accumulator follows its block around the ring, one step later, and ends on the block's
        rank. Its last elements are the sums of the ranks' ``own_terms``, whose sum is the second result.
        """
        wide, width = accumulator_dtype(self.own.dtype), self.own.shape[1]
        extra = 0 if own_terms is None else own_terms.numel()
        wait_sums: Callable[[], Tensor] | None = None
        for block in self.blocks():
            # Ranks may have different gains, so each rank applies its own before the sums move on.
            message = block.k.new_zeros(len(block.k) * width + extra, dtype=wide)
            sums = message[: len(block.k) * width].view(len(block.k), width)
            add_block(block, [sums])
            sums.mul_(gain)
            if own_terms is not None:
                message[-extra:] = own_terms
            if wait_sums is not None:
                message += wait_sums()
            wait_sums = self._start_shift(block.step, message, width, extra)
        assert wait_sums is not None
        received = wait_sums()
        own = received[: len(received) - extra].view(len(self.own), width).to(dtype)
        return own, None if own_terms is None else received[-extra:].sum()

    def _block(self, step: int, k: Tensor) -> KeyBlock:
        owner = (self.layout.rank - step) % self.count
        return KeyBlock(step, k, self.starts[owner], 0 if step == 0 else None)

    def _start_shift(
        self, step: int, piece: Tensor, per_key: int = 1, extra: int = 0
    ) -> Callable[[], Tensor]:
        """Start sending this step's piece to the next rank; the result waits for the previous rank's.

        A piece has ``per_key`` elements for each key of a block, and ``extra`` more.
        """
        owners = [(rank - step) % self.count for rank in range(self.count)]
        sizes = [self.layout.sizes[owner] * per_key + extra for owner in owners]
        return _start(
            self.comm_stream,
            piece,
            lambda: shift(piece, sizes=sizes, group=self.layout.group, async_op=True),
        )


def _start(stream: Stream | None, piece: Tensor, call: Callable[[], Any]) -> Callable[[], Tensor]:
    """Start a call that reads ``piece``; on a CUDA device, on the communication stream."""
    if stream is None:
        handle = call()
        return lambda: cast("Tensor", handle.wait())
    stream.wait_stream(torch.cuda.current_stream(piece.device))
    with torch.cuda.stream(stream):
        handle = call()
    piece.record_stream(stream)

    def wait() -> Tensor:
        received: Tensor = handle.wait()
        compute_stream = torch.cuda.current_stream(received.device)
        compute_stream.wait_stream(stream)
        received.record_stream(compute_stream)
        return received

    return wait
