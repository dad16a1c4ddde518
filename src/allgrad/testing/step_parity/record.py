"""A few steps on one rank, with everything that is compared afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from allgrad.testing.step_parity.compare import rounding_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from allgrad.testing.step_parity.case import Case, Evaluation, State

__all__ = ["StepRecord", "record"]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of one rank: the state before it, its gradients, the state after it."""

    before: State  # parameters and buffers
    result: Evaluation
    buffers: State
    parameters: State


def record(case: Case, world: int) -> list[list[StepRecord]]:
    """The steps of every rank: of the ranks of the case, or of a world of one."""
    return case.run(_record_here, world)


def _record_here(case: Case) -> list[StepRecord]:
    steps = []
    with case.precision():
        model = case.build()
        optimizer = case.make_optimizer(model.wrapped.parameters())
        for step in range(case.steps):
            before = {**model.parameters(), **model.buffers()}
            optimizer.zero_grad()
            result = case.evaluate(model, case.own_batch(case.pieces(step)), step)
            _drop_rounding(model.wrapped.parameters(), rounding_of(result.gradients))
            optimizer.step()
            steps.append(StepRecord(before, result, model.buffers(), model.parameters()))
    return steps


def _drop_rounding(parameters: Iterable[Tensor], rounding: float) -> None:
    """Set to zero what is rounding of a gradient of zero, and other rounding on other ranks.

    A bias in front of a batch norm has such a gradient, and Adam would make a step of it.
    """
    for p in parameters:
        if p.grad is not None and not p.grad.is_sparse:
            own = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
            own.masked_fill_(own.abs() <= rounding, 0)
