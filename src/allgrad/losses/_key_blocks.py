"""The keys of all ranks, block by block: gathered as one block, or passed around a ring of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from allgrad.collectives.all_gather import all_gather, reduce_scatter
from allgrad.collectives.permute import shift
from allgrad.losses._tiles.accumulators import accumulator, narrow, wide_zeros

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeAlias

    from torch import Tensor
    from torch.cuda import Stream

    from allgrad._wire.primitives import GroupLike

    Visit: TypeAlias = Callable[["Block", list[Tensor]], None]

__all__ = ["Block", "Gathered", "Place", "Ring", "keys_of_all"]


class Block(NamedTuple):
    """Some of the joined keys: where they start, and which of them row 0 here is a pair with."""

    number: int
    k: Tensor
    start: int
    first_pair: int | None

    @property
    def columns(self) -> slice:
        return slice(self.start, self.start + len(self.k))


@dataclass(frozen=True, slots=True)
class Place:
    """A rank among those of the group, and how many columns each of them brings."""

    rank: int
    columns: tuple[int, ...]
    group: GroupLike

    @property
    def world(self) -> int:
        return len(self.columns)

    def start(self, rank: int) -> int:
        return sum(self.columns[:rank])

    @property
    def own(self) -> slice:
        return slice(self.start(self.rank), self.start(self.rank + 1))


def keys_of_all(place: Place, k: Tensor, budget: int, ring: bool | None) -> Gathered | Ring:
    """Gather if the joined keys and the sums of their gradients fit into ``budget`` bytes."""
    width = k.shape[1] * (k.dtype.itemsize + accumulator(k.dtype).itemsize)
    if ring is None:
        ring = sum(place.columns) * width > budget
    return Ring(place, k) if ring and place.world > 1 else Gathered(place, k)


class Gathered:
    """Every rank has all keys.

    rank 0   [ a a ]              [ a a | b | c c c ]
    rank 1   [ b ]       --->     [ a a | b | c c c ]
    rank 2   [ c c c ]            [ a a | b | c c c ]
    """

    count = 1

    def __init__(self, place: Place, k: Tensor) -> None:
        self.place = place
        joined = k.contiguous()
        if place.world > 1:
            joined = all_gather(joined, sizes=place.columns, group=place.group, grad="none")
        self.block = Block(0, joined, 0, place.own.start)

    def blocks(self) -> Iterator[Block]:
        yield self.block

    def collect(self, visit: Visit, gain: Tensor, dtype: torch.dtype) -> Tensor:
        """Let the block add to sums for all keys; give each rank those of its own, times gain."""
        joined = self.block.k
        if self.place.world == 1:
            parts = wide_zeros(joined, dtype)
            visit(self.block, parts)
            return narrow(parts, gain, dtype)
        sums = joined.new_zeros(joined.shape, dtype=accumulator(joined.dtype))
        visit(self.block, [sums])
        sums.mul_(gain)
        own = reduce_scatter(sums, sizes=self.place.columns, group=self.place.group)
        return own.to(dtype)


class Ring:
    """Every rank sees the pieces one after another, each from the rank before it.

    rank 0   [ a a ]         [ c c c ]         [ b ]
    rank 1   [ b ]     --->  [ a a ]     --->  [ c c c ]
    rank 2   [ c c c ]       [ b ]             [ a a ]

    A piece moves on before it is computed with, so that the next one comes meanwhile
    (test_next_block_is_under_way_while_this_one_is_computed).
    """

    def __init__(self, place: Place, k: Tensor) -> None:
        self.place = place
        self.own = k.contiguous()
        self.count = place.world
        self.beside = torch.cuda.Stream(k.device) if k.is_cuda else None

    def blocks(self) -> Iterator[Block]:
        k = self.own
        for step in range(self.count):
            arrive = self._pass_on(step, k) if step + 1 < self.count else None
            yield self._block(step, k)
            if arrive is not None:
                k = arrive()

    def collect(self, visit: Visit, gain: Tensor, dtype: torch.dtype) -> Tensor:
        """Let each block add to the sums that travel with it; they end where they belong.

        Sums of a block follow it one step later, while the next block is computed with.
        """
        wide = accumulator(self.own.dtype)
        bring_sums: Callable[[], Tensor] | None = None
        for block in self.blocks():
            # Each rank's scores may have a gain of their own, so it goes in before the sums move on.
            added = block.k.new_zeros(block.k.shape, dtype=wide)
            visit(block, [added])
            added.mul_(gain)
            if bring_sums is not None:
                added += bring_sums()
            bring_sums = self._pass_on(block.number, added)
        assert bring_sums is not None
        return bring_sums().to(dtype)

    def _block(self, step: int, k: Tensor) -> Block:
        owner = (self.place.rank - step) % self.count
        return Block(step, k, self.place.start(owner), 0 if step == 0 else None)

    def _pass_on(self, step: int, held: Tensor) -> Callable[[], Tensor]:
        """Start to send what is held in this step to the next rank; what is returned awaits its turn."""
        sizes = [self.place.columns[(rank - step) % self.count] for rank in range(self.count)]
        return _start(
            self.beside,
            held,
            lambda: shift(held, sizes=sizes, group=self.place.group, async_op=True),
        )


def _start(beside: Stream | None, held: Tensor, call: Callable[[], Any]) -> Callable[[], Tensor]:
    """Start a call that reads ``held``, on a CUDA device in a stream beside the one that computes."""
    if beside is None:
        handle = call()
        return lambda: cast("Tensor", handle.wait())
    beside.wait_stream(torch.cuda.current_stream(held.device))
    with torch.cuda.stream(beside):
        handle = call()
    held.record_stream(beside)

    def arrive() -> Tensor:
        got: Tensor = handle.wait()
        here = torch.cuda.current_stream(got.device)
        here.wait_stream(beside)
        got.record_stream(here)
        return got

    return arrive
