"""The cases that are measured, with the inputs and the expected results of every rank.

Values are small whole numbers, whose sums are exact in any order: a result is bitwise equal or
wrong. Pieces are rows of 256 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["MANY", "MANY_BYTES", "OPERATIONS", "Case", "cases", "expected", "inputs_and_gradients"]

OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all")
MANY, MANY_BYTES = 200, 10 * 1024
_ELEMENT = 4
_WIDTH = 64


@dataclass(frozen=True, slots=True)
class Case:
    """One collective in one world. The largest piece has ``nbytes``; ``skewed`` pieces are 1:...:1:8."""

    operation: str
    world: int
    nbytes: int
    skewed: bool = False
    tensors: int = 1

    @property
    def title(self) -> str:
        """The row of the table that shows this case."""
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
    """All cases of a run, including one element and many tensors."""
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


def inputs_and_gradients(case: Case, rank: int) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors of a rank, and the gradients of its results."""
    piece, joined = case.rows[rank], sum(case.rows)
    held = joined if case.operation == "reduce_scatter" else piece
    got = joined if case.operation == "all_gather" else piece
    numbers = range(case.tensors)
    return (
        [_values(held, case.width, 1000 * rank + i) for i in numbers],
        [_values(got, case.width, 1000 * rank + i + 500) for i in numbers],
    )


def expected(case: Case, rank: int) -> tuple[list[Tensor], list[Tensor]]:
    """The correct results and gradients of a rank, computed from the inputs of all ranks."""
    results, gradients = [], []
    everyone = [inputs_and_gradients(case, other) for other in range(case.world)]
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
            return _sum([x.split(case.rows)[rank] for x in xs])
        case "all_to_all":
            return torch.cat([x.chunk(case.world)[rank] for x in xs])
        case "broadcast":
            return xs[0]
    return _sum(xs)


def _adjoint(case: Case, gs: list[Tensor], rank: int) -> Tensor:
    match case.operation:
        case "all_gather":
            return _sum([g.split(case.rows)[rank] for g in gs])
        case "reduce_scatter":
            return torch.cat(gs)
        case "all_to_all":
            return torch.cat([g.chunk(case.world)[rank] for g in gs])
        case "broadcast" if rank:
            return torch.zeros_like(gs[0])
    return _sum(gs)


def _sum(xs: Sequence[Tensor]) -> Tensor:
    total = xs[0].clone()
    for x in xs[1:]:
        total += x
    return total


def _values(rows: int, width: int, seed: int) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 10, (rows, width), generator=source).float()
