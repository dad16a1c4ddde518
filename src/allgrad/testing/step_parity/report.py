"""``parity``: whether a training step on ranks equals the same step in one process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from allgrad.errors import AllgradError, InputError, rank_table
from allgrad.testing.failures import RankFailed, RanksStuck
from allgrad.testing.step_parity.case import Case, NoGradient, join_pieces
from allgrad.testing.step_parity.compare import first_difference, relative_difference
from allgrad.testing.step_parity.diagnose import accumulation_note, diagnose, not_finite
from allgrad.testing.step_parity.mistakes import LOOK, Diagnosis, Mistake
from allgrad.testing.step_parity.record import record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor, nn

    from allgrad.testing.step_parity.case import MakeOptimizer, Wrapper
    from allgrad.testing.step_parity.compare import Difference
    from allgrad.testing.step_parity.record import StepRecord

__all__ = ["ParityReport", "parity"]


@dataclass(frozen=True, slots=True)
class ParityReport:
    """What ``parity`` found. It is true where the steps are equal; ``str`` tells all of it."""

    ranks: int
    steps: int
    under: str  # the wrapper, in words
    difference: Difference | None
    diagnosis: Diagnosis | None
    note: str | None
    largest: float  # relative difference of any parameter at the end
    largest_name: str

    @property
    def equal(self) -> bool:
        """Whether all gradients, buffers and parameters are those of one process."""
        return self.difference is None and self.diagnosis is None

    @property
    def mistake(self) -> Mistake | None:
        """What the difference looks like."""
        return None if self.diagnosis is None else self.diagnosis.mistake

    def __bool__(self) -> bool:
        return self.equal

    def __str__(self) -> str:
        who = f"{self.ranks} ranks{self.under}"
        if self.equal:
            steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
            text = (
                f"parity: {steps} on {who} equal one process on the joined batch.\n"
                f"Largest difference of any parameter: {self.largest:.1e} of it ({self.largest_name})"
            )
            return text if self.note is None else f"{text}\n{self.note}"
        if self.difference is None:
            return f"parity: {who} do not finish a step.\n{self.diagnosis}"
        d = self.difference
        what = {"gradient": "the gradient of ", "buffer": "buffer ", "parameter": "parameter "}
        noted = self.note is not None and self.mistake is not Mistake.ACCUMULATION
        others = f", and {len(d.also)} more" if d.also else ""
        how = "differ from" if self.mistake is not Mistake.NOT_FINITE else "cannot be compared with"
        return rank_table(
            f"parity: {who} {how} one process at step {d.step}, first in "
            f"{what[d.kind]}{d.name}{others}.",
            [f"off by {by:.3g}, where the largest entry is {d.scale:.3g}" for by in d.by_rank],
            {},
            f"{self.diagnosis}\n{self.note}" if noted else str(self.diagnosis),
        )


def parity(
    make_model: Callable[[], nn.Module],
    make_batch: Callable[[int, int, int], Any],
    step: Callable[[Any, Any], Tensor | float | None],
    *,
    ranks: int = 4,
    wrapper: Wrapper = None,
    steps: int = 3,
    make_optimizer: MakeOptimizer | None = None,
    join: Callable[[Sequence[Any]], Any] = join_pieces,
    dtype: torch.dtype | None = torch.float64,
    rtol: float | None = None,
    seed: int = 0,
    backend: str = "gloo",
    timeout: float = 60.0,
) -> ParityReport:
    """Run a training step on real ranks and in one process on the joined batch, and compare.

        rank 0   step(model, [ a a ])
        rank 1   step(model, [ b ])            gradients, buffers        step(model, [ a a b c c c ])
        rank 2   step(model, [ c c c ])        and parameters equal?     in a world of one rank

    ``make_model()`` gives the model, with one seed everywhere. ``make_batch(step, rank, ranks)``
    gives a rank's piece: any nest of tensors, rows along dim 0; ``join`` makes one batch of all
    pieces, where they are no such nest. ``step(model, batch)`` returns the loss, and may call
    ``backward`` itself, as often as it likes. ``parity`` sets gradients to zero before it, calls
    ``backward`` if it did not, and steps the optimizer after it (``make_optimizer(parameters)``).

    ``wrapper`` is ``"ddp"``, ``"fsdp"`` (FSDP2), a function from model to wrapped model, or None:
    then the step itself has to give every rank the gradient of the whole. The world of one has the
    wrapper too, so the step may use it as it does on ranks.

    ``dtype`` is that of parameters, floating-point batches and new tensors; None leaves all as
    it is. ``rtol`` is relative to the largest entry of a tensor, 4e-10 in float64 by default.

    The report is true if all is equal. If not, it has the first step and tensor that differ, and
    what that looks like: a few experiments tell ten usual mistakes apart.

    Cost: the steps in both worlds; experiments take about as many runs of the step again as there
    are ranks and rows, each with a new model. Take a small model and few rows.
    """
    _require_arguments(ranks, steps, wrapper)
    case = Case(
        make_model=make_model,
        make_batch=make_batch,
        step=step,
        ranks=ranks,
        wrapper=wrapper,
        steps=steps,
        make_optimizer=make_optimizer or _sgd,
        join=join,
        dtype=dtype,
        seed=seed,
        backend=backend,
        timeout=timeout,
    )
    under = {"ddp": " under DDP", "fsdp": " under FSDP", "None": ""}.get(str(wrapper), ", wrapped,")
    one = record(case, 1)[0]
    try:
        found = record(case, ranks)
    except (RankFailed, RanksStuck) as failure:
        diagnosis = _unfinished(failure, one)
        if diagnosis is None:
            raise
        return ParityReport(ranks, steps, under, None, diagnosis, None, float("nan"), "")
    difference = first_difference(found, one, rtol)
    diagnosis = None if difference is None else _diagnose(case, difference, found, one)
    largest = relative_difference(found, one)
    note = accumulation_note(found)
    return ParityReport(ranks, steps, under, difference, diagnosis, note, *largest)


def _diagnose(
    case: Case,
    difference: Difference,
    found: Sequence[Sequence[StepRecord]],
    one: Sequence[StepRecord],
) -> Diagnosis:
    """Name the mistake, in float64: experiments need the digits."""
    known = not_finite(difference, found, one)
    if known is not None:
        return known
    if case.dtype is torch.float64:
        return diagnose(case, difference, found, one)
    exact = replace(case, dtype=torch.float64)
    try:
        one = record(exact, 1)[0]
        found = record(exact, case.ranks)
    except AllgradError:
        return Diagnosis(Mistake.UNKNOWN, "the step does not run in float64.", LOOK)
    again = first_difference(found, one, None)
    if again is None:
        return Diagnosis(
            Mistake.ROUNDING,
            "in float64 the steps are equal.",
            "Give a larger rtol=, or compute in a wider dtype where sums over ranks are made.",
        )
    return diagnose(exact, again, found, one)


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def _require_arguments(ranks: int, steps: int, wrapper: object) -> None:
    if ranks < 2 or steps < 1:
        raise InputError(
            f"parity: {ranks} ranks and {steps} steps.\nGive at least 2 ranks and 1 step."
        )
    if wrapper not in {"ddp", "fsdp", None} and not callable(wrapper):
        raise InputError(
            f'parity: there is no wrapper {wrapper!r}.\nUse "ddp", "fsdp", None, or a function.'
        )


def _unfinished(failure: RankFailed | RanksStuck, one: Sequence[StepRecord]) -> Diagnosis | None:
    """What ranks that do not finish look like; None where the step itself raised."""
    if isinstance(failure, RanksStuck):
        advice = "Let every rank take part in every collective, in forward and in backward."
        return Diagnosis(Mistake.STUCK, str(failure), advice)
    errors = [e.exception for _, e in sorted(failure.failures.items())]
    missing = [error for error in errors if isinstance(error, NoGradient)]
    if not missing:
        return None
    first = missing[0]
    names = ", ".join(first.names)
    known = all(name in one[0].result.gradients for name in first.names)
    if len(missing) == failure.world and known and not first.all_of_them:
        return Diagnosis(
            Mistake.DETACHED,
            f"{names} have a gradient in one process, but on no rank.",
            "Gather with gradient: ag.all_gather(x), not under no_grad, nor of a detached tensor.",
        )
    which = "none of its parameters has" if first.all_of_them else f"{names} do not have"
    return Diagnosis(
        Mistake.RANK_WITHOUT_GRADIENT,
        f"on rank {first.rank} {which} a gradient after the step, for which other ranks wait.",
        "Call backward on every rank, with a loss that depends on all parameters.",
    )
