"""A step of ``clip_loss`` as the calls that it makes (test_a_step_makes_three_collective_calls).

Keys are gathered, or go around a ring if they do not fit; sums of all columns follow; in backward
the gradients of the keys. A small batch on CPUs is gathered whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from allgrad._wire import costs
from allgrad._wire.algorithms import choose
from allgrad._wire.groups import Backend
from allgrad._wire.link_model import Links, Prediction, predict, seconds, situation
from allgrad._wire.topology import ONE_HOST, Topology
from allgrad.losses._pairs.column_sums import ONE_MESSAGE_UP_TO
from allgrad.losses._pairs.global_loss import BUDGET
from allgrad.losses._pairs.key_blocks import KeyLayout, needs_ring
from allgrad.losses._pairs.whole_pass import is_few
from allgrad.losses._tiles.accumulators import accumulator_dtype
from allgrad.losses._tiles.torch import KEPT_SCORES

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ClipStep", "StepCall", "StepPlan"]


class StepCall(NamedTuple):
    """Calls of one kind in a step: what for, which algorithm, how many, seconds of all of them."""

    purpose: str
    operation: str
    algorithm: str
    calls: int
    nbytes: int  # that a rank passes to each
    seconds: float


class StepPlan(NamedTuple):
    """A step on each rank: its calls, bytes beside the inputs, operations of its matrix products."""

    ranks: int
    ring: bool
    calls: tuple[StepCall, ...]
    memory: float
    operations: float

    @property
    def seconds(self) -> float:
        """Of communication."""
        return sum(call.seconds for call in self.calls)


@dataclass(frozen=True, slots=True)
class ClipStep:
    """So many pairs on every rank, features of so many elements, sizes given."""

    pairs: int
    width: int
    dtype: torch.dtype
    backend: Backend = Backend.GLOO

    def plan(self, ranks: int, links: Links, topology: Topology = ONE_HOST) -> StepPlan:
        """The step in a world of so many ranks."""
        layout = KeyLayout(0, (self.pairs,) * ranks, None)
        keys = torch.empty((self.pairs, self.width), dtype=self.dtype, device="meta")
        ring = needs_ring(layout, keys, BUDGET, None)
        calls = []
        for purpose, operation, nbytes, count in self._calls(ranks, ring):
            name = "all_to_all" if operation == "shift" else operation
            s = situation(name, ranks, nbytes, backend=self.backend, topology=topology)
            if operation == "shift":  # an all_to_all in which each rank sends to one other
                name = choose(s._replace(operation="all_to_all", equal=False)).name
                found = Prediction(name, seconds(costs.shift(s), s, links), nbytes)
            else:
                found = predict(s, links)
            about = found.algorithm, count, nbytes, count * found.seconds
            calls.append(StepCall(purpose, operation, *about))
        scores = self.pairs * self.pairs * ranks
        kept = not ring and scores <= KEPT_SCORES[self._device]
        products = 3 if kept else 4  # scores, gradients of queries and keys; scores again
        return StepPlan(
            *(ranks, ring, tuple(calls), self._memory(ranks, ring, scores if kept else 0)),
            2.0 * products * scores * self.width,
        )

    @property
    def _device(self) -> str:
        return "cpu" if self.backend is Backend.GLOO else "cuda"

    def _calls(self, ranks: int, ring: bool) -> Iterator[tuple[str, str, int, int]]:
        wide = accumulator_dtype(self.dtype).itemsize
        elements, total = self.pairs * self.width, self.pairs * ranks
        if not ring and self._device == "cpu" and is_few(total, self.width):
            yield "queries and keys", "all_gather", 2 * elements * self.dtype.itemsize, 1
            yield "weight of the loss", "all_reduce", wide, 1
            return
        if ring:
            yield "keys, forward", "shift", elements * self.dtype.itemsize, ranks - 1
        else:
            yield "keys", "all_gather", elements * self.dtype.itemsize, 1
        if ranks * total * wide > ONE_MESSAGE_UP_TO:
            yield "sums of columns", "all_to_all", total * wide, 1
            yield "sums of all columns", "all_gather", (self.pairs + 1) * wide, 1
        else:
            yield "sums of columns", "all_gather", (total + self.pairs + 1) * wide, 1
        if ring:
            yield "keys, backward", "shift", elements * self.dtype.itemsize, ranks - 1
            yield "gradients of keys", "shift", (elements + 1) * wide, ranks
        else:
            yield "gradients of keys", "reduce_scatter", ranks * (elements + 1) * wide, 1

    def _memory(self, ranks: int, ring: bool, kept_scores: int) -> float:
        """Keys, accumulators of their gradients and the message of these; scores that are kept."""
        wide = accumulator_dtype(self.dtype).itemsize
        blocks = 2 if ring else ranks  # this one, and the next one that is under way
        keys = blocks * self.pairs * self.width * (self.dtype.itemsize + 2 * wide)
        return keys + kept_scores * wide
