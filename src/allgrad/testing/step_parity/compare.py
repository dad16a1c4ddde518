"""The first thing that differs between the ranks and one process."""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeAlias

    from torch import Tensor

    from allgrad.testing.step_parity.case import State
    from allgrad.testing.step_parity.record import StepRecord

    Kind: TypeAlias = Literal["gradient", "buffer", "parameter"]

__all__ = [
    "Difference",
    "distance",
    "first_difference",
    "flat",
    "is_usable",
    "relative_difference",
    "rounding_of",
    "same",
]

# Times the rounding of the largest entry of all tensors.
_FLOOR = 1e3  # sums may differ so much
_NOTHING = 64  # a gradient of zero comes out so large


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor at one step, which differs on some rank."""

    step: int
    kind: Kind
    name: str
    by_rank: tuple[float, ...]  # the largest difference of any entry
    scale: float  # the largest entry in one process
    also: tuple[str, ...]  # other tensors of this kind that differ at this step

    @property
    def ranks(self) -> list[int]:
        """The ranks that differ most, and those that differ as much up to a factor of 1000."""
        worst = max(_ordered(d) for d in self.by_rank)
        return [rank for rank, d in enumerate(self.by_rank) if _ordered(d) * 1000 > worst]


def first_difference(
    ranks: Sequence[Sequence[StepRecord]], one: Sequence[StepRecord], rtol: float | None
) -> Difference | None:
    """The first step and tensor that differ: gradients before buffers before parameters."""
    for step, expected in enumerate(one):
        found = [record[step] for record in ranks]
        kinds: list[tuple[Kind, list[State], State]] = [
            ("gradient", [r.result.gradients for r in found], expected.result.gradients),
            ("buffer", [r.buffers for r in found], expected.buffers),
            ("parameter", [r.parameters for r in found], expected.parameters),
        ]
        for kind, states, state in kinds:
            difference = _difference(step, kind, states, state, rtol)
            if difference is not None:
                return difference
    return None


def relative_difference(
    ranks: Sequence[Sequence[StepRecord]], one: Sequence[StepRecord]
) -> tuple[float, str]:
    """The largest difference of any parameter after the last step, relative to it, and its name."""
    expected = one[-1].parameters
    found = {
        name: max(distance(r[-1].parameters[name], value) for r in ranks) / (_largest(value) or 1.0)
        for name, value in expected.items()
    }
    name = max(found, key=lambda n: _ordered(found[n]))
    return found[name], name


def same(state: State, expected: State) -> bool:
    """Tell whether two states are equal up to rounding."""
    return _difference(0, "buffer", [state], expected, None) is None


def is_usable(kind: Kind, x: Tensor) -> bool:
    """Tell whether all entries are numbers; infinite ones are allowed in buffers, as in a mask."""
    return not bool((x.isnan() if kind == "buffer" else ~x.isfinite()).any())


def distance(a: Tensor | None, b: Tensor) -> float:
    """The largest difference of any entry, none between equal infinite ones; a missing tensor is zero."""
    if a is None:
        return _largest(b)
    if a.shape != b.shape:
        return float("inf")
    if not b.numel():
        return 0.0
    a, b = a.to(_wide(b)), b.to(_wide(b))
    return float((a - b).abs().masked_fill(a == b, 0).max())


def rounding_of(state: State) -> float:
    """Entries below this number may be nothing but the rounding of others."""
    floating = [x for x in state.values() if x.is_floating_point()]
    return max((_NOTHING * torch.finfo(x.dtype).eps * _scale(x) for x in floating), default=0.0)


def flat(state: State, like: State) -> Tensor:
    """The tensors that ``like`` has, in its order, as one vector; missing ones are zero."""
    parts = [state.get(name, torch.zeros_like(x)).double().flatten() for name, x in like.items()]
    return torch.cat(parts) if parts else torch.zeros(0).double()


def _difference(
    step: int, kind: Kind, states: Sequence[State], expected: State, rtol: float | None
) -> Difference | None:
    largest = max((_scale(b) for b in expected.values()), default=0.0)
    differ: dict[str, tuple[float, ...]] = {}
    for name, b in expected.items():
        by_rank = tuple(distance(state.get(name), b) for state in states)
        if any(not d <= _limit(b, rtol, largest) for d in by_rank) or not is_usable(kind, b):
            differ[name] = by_rank
    for name in sorted({n for state in states for n in state} - expected.keys()):
        by_rank = tuple(_largest(s[name]) if name in s else 0.0 for s in states)
        if any(not d <= 0 for d in by_rank):
            differ[name] = by_rank
    if not differ:
        return None
    first, *also = differ
    scale = _largest(expected[first]) if first in expected else 0.0
    return Difference(step, kind, first, differ[first], scale, tuple(also))


def _limit(b: Tensor, rtol: float | None, largest: float) -> float:
    """What rounding may do: relative to this tensor, and a little of the largest of all."""
    if not b.is_floating_point():
        return 0.0
    eps = torch.finfo(b.dtype).eps
    relative: float = eps**0.6 if rtol is None else rtol
    return relative * _scale(b) + min(_FLOOR * eps, relative) * largest


def _largest(x: Tensor) -> float:
    return float(x.to(_wide(x)).abs().max()) if x.numel() else 0.0


def _scale(x: Tensor) -> float:
    """The largest finite entry."""
    return _largest(x.masked_fill(~x.isfinite(), 0))


def _wide(x: Tensor) -> torch.dtype:
    return torch.complex128 if x.is_complex() else torch.float64


def _ordered(difference: float) -> float:
    """NaN is the largest difference."""
    return float("inf") if isnan(difference) else difference
