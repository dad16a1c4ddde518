"""What a difference looks like: facts of the record first, then experiments."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from allgrad.errors import AllgradError
from allgrad.testing.step_parity.compare import distance, flat, is_usable, same
from allgrad.testing.step_parity.experiments import Experiments
from allgrad.testing.step_parity.mistakes import LOOK, Diagnosis, Mistake, ranks_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from allgrad.testing.step_parity.case import Case, State
    from allgrad.testing.step_parity.compare import Difference
    from allgrad.testing.step_parity.record import StepRecord

__all__ = ["accumulation_note", "diagnose", "not_finite"]

_CLOSE = 1e-4  # to a whole number of ranks, relative


def diagnose(
    case: Case,
    difference: Difference,
    ranks: Sequence[Sequence[StepRecord]],
    one: Sequence[StepRecord],
) -> Diagnosis:
    """Name the mistake behind the first difference."""
    found = [record[difference.step] for record in ranks]
    expected = one[difference.step]
    if difference.kind == "buffer":
        return _buffer(difference, found, expected)
    if difference.kind == "parameter":
        return Diagnosis(
            Mistake.OPTIMIZER,
            "the gradients are equal, but not what the optimizer makes of them.",
            "Give every rank the same optimizer, made after the model was wrapped.",
        )
    known = _by_record(case, found, expected)
    if known is not None:
        return known
    try:
        return Experiments(case, difference.step, found[0], expected).diagnose()
    except AllgradError as error:  # the step does not take what an experiment gives it
        reason = str(error).splitlines()[0]
        return Diagnosis(Mistake.UNKNOWN, f"an experiment failed ({reason}).", LOOK)


def not_finite(
    difference: Difference, ranks: Sequence[Sequence[StepRecord]], one: Sequence[StepRecord]
) -> Diagnosis | None:
    """What to say where entries are NaN or infinite, on ranks or in one process."""
    kind, step = difference.kind, difference.step
    states = [_states(record[step])[kind] for record in ranks]
    whole = _states(one[step])[kind]
    for name in (difference.name, *difference.also):
        alone = name in whole and not is_usable(kind, whole[name])
        where = [r for r, s in enumerate(states) if name in s and not is_usable(kind, s[name])]
        if alone or where:
            what = f"the gradient of {name}" if kind == "gradient" else f"{kind} {name}"
            return _not_finite(what, where, alone)
    return None


def _not_finite(what: str, ranks: Sequence[int], alone: bool) -> Diagnosis:
    if ranks and alone:
        where = f"on {ranks_text(ranks)}, and in one process too."
        look = "Look for it in one process: a division by zero, a logarithm of zero, an overflow."
    elif ranks:
        where = f"on {ranks_text(ranks)}; in one process all are finite."
        look = "Look for what a rank has by itself: a mean over no rows, values that only it divides by."
    else:
        where = "in one process; on ranks all are finite."
        look = "Look for what only the joined batch has: a sum of more rows, which overflows."
    return Diagnosis(Mistake.NOT_FINITE, f"{what} has NaN or infinite entries {where}", look)


def _states(record: StepRecord) -> dict[str, State]:
    return {
        "gradient": record.result.gradients,
        "buffer": record.buffers,
        "parameter": record.parameters,
    }


def accumulation_note(ranks: Sequence[Sequence[StepRecord]]) -> str | None:
    """What to say of a step in which DDP synchronises more than once."""
    most = max(step.result.syncs for record in ranks for step in record)
    if most < 2:
        return None
    return (
        f"DDP synchronises gradients {most} times in one step.\n"
        "Accumulate under model.no_sync() in all micro-batches but the last."
    )


def _buffer(difference: Difference, found: Sequence[StepRecord], expected: StepRecord) -> Diagnosis:
    name = difference.name
    changed = distance(expected.before.get(name), expected.buffers[name]) > 0
    stale = [
        rank for rank, r in enumerate(found) if distance(r.before.get(name), r.buffers[name]) == 0
    ]
    if stale and changed:
        seen = f"{name} changes in one process, but not on {ranks_text(stale)}."
        return Diagnosis(Mistake.BUFFER, seen, "Update it on every rank, before it is used.")
    apart = any(distance(r.buffers[name], found[0].buffers[name]) > 0 for r in found)
    how = "the ranks hold different values" if apart else "all ranks hold the same value"
    seen = f"{name} is another than in one process after the step; {how}."
    return Diagnosis(
        Mistake.BUFFER, seen, "Update it from the rows of all ranks, e.g. with ag.all_reduce."
    )


def _by_record(case: Case, found: Sequence[StepRecord], expected: StepRecord) -> Diagnosis | None:
    """What the gradients alone tell."""
    gradients = [r.result.gradients for r in found]
    whole = expected.result.gradients
    count = max(r.result.syncs for r in found)
    # Plain DDP averages again what is the same on all ranks: that is exact.
    if count > 1 and case.wrapper != "ddp":
        return Diagnosis(
            Mistake.ACCUMULATION,
            f"DDP synchronises gradients {count} times in one step. With a hook that sums, what was "
            "summed already is summed again.",
            "Accumulate under model.no_sync() in all micro-batches but the last.",
        )
    if not all(same(g, gradients[0]) for g in gradients[1:]):
        return _apart(gradients, whole)
    factor = _common_factor(gradients[0], whole)
    return None if factor is None else _factor(case, factor)


def _apart(gradients: Sequence[State], whole: State) -> Diagnosis:
    total = {name: _sum([g.get(name) for g in gradients], whole[name]) for name in whole}
    mean = {name: g / len(gradients) for name, g in total.items()}
    for state, word in ((total, "sum"), (mean, "mean")):
        if same(state, whole):
            return Diagnosis(
                Mistake.NOT_SYNCHRONISED,
                f"rank 1 has only rank 1's part; the {word} of all ranks' parts is right.",
                f"Take the {word} over ranks: a wrapper, or ag.all_reduce of the gradients.",
            )
    return Diagnosis(
        Mistake.NOT_SYNCHRONISED,
        "the ranks have different gradients.",
        "Use a wrapper, or ag.all_reduce of the gradients, on every rank.",
    )


def _factor(case: Case, factor: float) -> Diagnosis:
    averaging = {"ddp": "DDP", "fsdp": "FSDP"}.get(str(case.wrapper))
    if abs(factor * case.ranks - 1) < _CLOSE:
        by = f"averaged by {averaging}" if averaging else "averaged over ranks"
        return Diagnosis(
            Mistake.FACTOR,
            f"every gradient is {case.ranks} times too small: {by}, while the loss is a sum.",
            "Multiply the loss by the number of ranks, or sum gradients (allgrad.wrappers).",
        )
    if abs(factor - case.ranks) < _CLOSE * case.ranks:
        return Diagnosis(
            Mistake.FACTOR,
            f"every gradient is {case.ranks} times too large: summed over ranks, while each rank "
            "has the whole loss already.",
            "Divide the loss by the number of ranks, or average the gradients.",
        )
    return Diagnosis(
        Mistake.FACTOR,
        f"every gradient is {factor:.6g} times that of one process.",
        "Look for a factor of the loss that depends on the number of ranks or rows.",
    )


def _common_factor(found: State, whole: State) -> float | None:
    """The one factor between two states, where there is one that is not 1."""
    a, b = flat(found, whole), flat(whole, whole)
    square = float(b @ b)
    if not square:
        return None
    factor = float(a @ b) / square
    scaled = {name: g * factor for name, g in whole.items()}
    return factor if abs(factor) > 1e-12 and same(found, scaled) else None


def _sum(parts: Sequence[Tensor | None], like: Tensor) -> Tensor:
    return torch.stack([torch.zeros_like(like) if p is None else p for p in parts]).sum(0)
