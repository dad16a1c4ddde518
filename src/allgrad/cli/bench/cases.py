"""What is measured: the cases, what every rank brings to one, and what is right there.

Values are small whole numbers: their sums are exact in any order, so that a way is right to the
last bit or wrong. Pieces are rows of 256 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["MANY", "MANY_BYTES", "OPERATIONS", "Case", "brought", "cases", "wanted"]

OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all")
MANY, MANY_BYTES = 200, 10 * 1024
_ELEMENT = 4
_WIDTH = 64


@dataclass(frozen=True, slots=True)
class Case:
    """One collective in one world. The largest piece has ``nbytes``; a skewed one is 1:...:1:8."""

    operation: str
    world: int
    nbytes: int
    skewed: bool = False
    tensors: int = 1

    @property
    def title(self) -> str:
        """The row of the table that this belongs to."""
        kind = ", skewed 1:8" if self.skewed else ""
        return f"{self.operation}{kind}" if self.tensors == 1 else f"{self.tensors} tensors"

    @property
    def width(self) -> int:
        """Elements in a row."""
        return min(_WIDTH, self.nbytes // _ELEMENT)

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of each rank's piece."""
        most = self.nbytes // _ELEMENT // self.width
        return (*((max(1, most // 8) if self.skewed else most,) * (self.world - 1)), most)


def cases(worlds: Sequence[int], sizes: Sequence[int], operations: Sequence[str]) -> list[Case]:
    """All cases of a run, the single element and the many tensors included."""
    found = []
    for world in worlds:
        found += [Case(op, world, n) for op in operations for n in sizes]
        skewed = [op for op in operations if op in {"all_gather", "reduce_scatter"}]
        found += [Case(op, world, n, skewed=True) for op in skewed for n in sizes]
        one = [op for op in operations if op in {"all_gather", "all_reduce"}]
        found += [Case(op, world, _ELEMENT) for op in one]
        if "all_reduce" in operations:
            found.append(Case("all_reduce", world, MANY_BYTES, tensors=MANY))
    return found


def brought(case: Case, rank: int) -> tuple[list[Tensor], list[Tensor]]:
    """What a rank holds, and the gradient of its result."""
    piece, joined = case.rows[rank], sum(case.rows)
    held = joined if case.operation == "reduce_scatter" else piece
    got = joined if case.operation == "all_gather" else piece
    numbers = range(case.tensors)
    return (
        [_values(held, case.width, 1000 * rank + i) for i in numbers],
        [_values(got, case.width, 1000 * rank + i + 500) for i in numbers],
    )


def wanted(case: Case, rank: int) -> tuple[list[Tensor], list[Tensor]]:
    """The right results and gradients of a rank, from what all of them bring."""
    results, gradients = [], []
    everyone = [brought(case, other) for other in range(case.world)]
    for i in range(case.tensors):
        xs, gs = [x[i] for x, _ in everyone], [g[i] for _, g in everyone]
        results.append(_forward(case, xs, rank))
        gradients.append(_adjoint(case, gs, rank))
    return results, gradients


def _forward(case: Case, xs: list[Tensor], rank: int) -> Tensor:
    match case.operation:
        case "all_gather":
            return torch.cat(xs)
        case "reduce_scatter":
            return _summed([x.split(case.rows)[rank] for x in xs])
        case "all_to_all":
            return torch.cat([x.chunk(case.world)[rank] for x in xs])
        case "broadcast":
            return xs[0]
    return _summed(xs)


def _adjoint(case: Case, gs: list[Tensor], rank: int) -> Tensor:
    match case.operation:
        case "all_gather":
            return _summed([g.split(case.rows)[rank] for g in gs])
        case "reduce_scatter":
            return torch.cat(gs)
        case "all_to_all":
            return torch.cat([g.chunk(case.world)[rank] for g in gs])
        case "broadcast" if rank:
            return torch.zeros_like(gs[0])
    return _summed(gs)


def _summed(xs: Sequence[Tensor]) -> Tensor:
    total = xs[0].clone()
    for x in xs[1:]:
        total += x
    return total


def _values(rows: int, width: int, seed: int) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 10, (rows, width), generator=source).float()
