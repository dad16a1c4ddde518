"""The keys of all ranks, in blocks: one gathered block, or one block per rank passed around a ring."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from allgrad.collectives.all_gather import all_gather, reduce_scatter
from allgrad.collectives.permute import shift
from allgrad.losses._tiles.accumulators import accumulator_dtype, accumulator_zeros, scale_and_cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeAlias

    from torch import Tensor
    from torch.cuda import Stream

    from allgrad.types import GroupLike

    AddBlock: TypeAlias = Callable[["KeyBlock", list[Tensor]], None]

__all__ = ["GatheredKeys", "KeyBlock", "KeyLayout", "RingKeys", "key_blocks"]


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


def key_blocks(
    layout: KeyLayout, k: Tensor, budget: int, ring: bool | None
) -> GatheredKeys | RingKeys:
    """Gather if the joined keys and their gradient accumulators fit into ``budget`` bytes."""
    row_bytes = k.shape[1] * (k.dtype.itemsize + accumulator_dtype(k.dtype).itemsize)
    if ring is None:
        ring = sum(layout.sizes) * row_bytes > budget
    return RingKeys(layout, k) if ring and layout.world > 1 else GatheredKeys(layout, k)


class GatheredKeys:
    """Every rank holds all keys, as one block.

    rank 0   [ a a ]              [ a a | b | c c c ]
    rank 1   [ b ]       --->     [ a a | b | c c c ]
    rank 2   [ c c c ]            [ a a | b | c c c ]
    """

    count = 1

    def __init__(self, layout: KeyLayout, k: Tensor) -> None:
        self.layout = layout
        joined = k.contiguous()
        if layout.world > 1:
            joined = all_gather(joined, sizes=layout.sizes, group=layout.group, grad="none")
        self.block = KeyBlock(0, joined, 0, sum(layout.sizes[: layout.rank]))

    def blocks(self) -> Iterator[KeyBlock]:
        yield self.block

    def gradients(self, add_block: AddBlock, gain: Tensor, dtype: torch.dtype) -> Tensor:
        """Let ``add_block`` fill accumulators for all keys; each rank gets its own, times ``gain``."""
        joined = self.block.k
        if self.layout.world == 1:
            parts = accumulator_zeros(joined, dtype)
            add_block(self.block, parts)
            return scale_and_cast(parts, gain, dtype)
        sums = joined.new_zeros(joined.shape, dtype=accumulator_dtype(joined.dtype))
        add_block(self.block, [sums])
        sums.mul_(gain)
        own = reduce_scatter(sums, sizes=self.layout.sizes, group=self.layout.group)
        return own.to(dtype)


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

    def gradients(self, add_block: AddBlock, gain: Tensor, dtype: torch.dtype) -> Tensor:
        """Let ``add_block`` fill an accumulator for each block; each rank gets its own, times ``gain``.

        The accumulator follows its block around the ring, one step later, and ends on the block's rank.
        """
        wide = accumulator_dtype(self.own.dtype)
        wait_sums: Callable[[], Tensor] | None = None
        for block in self.blocks():
            # Ranks may have different gains, so each rank applies its own before the sums move on.
            sums = block.k.new_zeros(block.k.shape, dtype=wide)
            add_block(block, [sums])
            sums.mul_(gain)
            if wait_sums is not None:
                sums += wait_sums()
            wait_sums = self._start_shift(block.step, sums)
        assert wait_sums is not None
        return wait_sums().to(dtype)

    def _block(self, step: int, k: Tensor) -> KeyBlock:
        owner = (self.layout.rank - step) % self.count
        return KeyBlock(step, k, self.starts[owner], 0 if step == 0 else None)

    def _start_shift(self, step: int, piece: Tensor) -> Callable[[], Tensor]:
        """Start sending this step's piece to the next rank; the result waits for the previous rank's."""
        sizes = [self.layout.sizes[(rank - step) % self.count] for rank in range(self.count)]
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
