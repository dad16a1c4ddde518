"""The mistakes that ``parity`` can name."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["LOOK", "Diagnosis", "Mistake", "ranks_text"]

LOOK = "Compare the losses of the ranks with that of one process, term by term."


class Mistake(Enum):
    """What a difference between ranks and one process looks like."""

    FACTOR = "a missing factor"
    RANDOM = "random numbers that differ"
    LOCAL_BATCH_NORM = "local batch norm"
    NOT_SYNCHRONISED = "gradients that stay on their rank"
    ACCUMULATION = "accumulation without no_sync"
    RANK_WITHOUT_GRADIENT = "a rank without gradient"
    DETACHED = "a detached gather"
    COUNTED_TWICE = "a term that is counted more than once"
    UNEQUAL_BATCHES = "a mean over unequal batches"
    SLICE = "a wrong slice"
    ORDER = "a gather in another order"
    BUFFER = "a stale buffer"
    STUCK = "ranks that wait for each other"
    OPTIMIZER = "an optimizer that differs"
    NOT_FINITE = "values that are not finite"
    ROUNDING = "rounding"
    UNKNOWN = "no mistake that is known"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A mistake, and what was seen of it."""

    mistake: Mistake
    seen: str
    advice: str

    def __str__(self) -> str:
        return f"It looks like {self.mistake.value}: {self.seen}\n{self.advice}"


def ranks_text(which: Sequence[int]) -> str:
    """Ranks in words."""
    return f"rank {which[0]}" if len(which) == 1 else f"ranks {', '.join(map(str, which))}"
