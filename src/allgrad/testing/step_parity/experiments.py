"""Experiments that tell mistakes apart: the step that differs again, with one thing changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from allgrad.containers.nests import split_tensors, tensors
from allgrad.testing.step_parity.compare import flat, same
from allgrad.testing.step_parity.mistakes import LOOK, Diagnosis, Mistake, ranks_text
from allgrad.testing.step_parity.probes import (
    Outcome,
    Probe,
    change_row,
    equal_pieces,
    equal_sizes,
    evaluate,
    one_row_apart,
    random_direction,
    roll_tensor,
    rows_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from allgrad.testing.step_parity.case import Case, State
    from allgrad.testing.step_parity.record import StepRecord

__all__ = ["Experiments"]

_CLOSE = 1e-4  # of finite differences, relative
_STEP = 1e-5  # of finite differences
_MOST_ROWS = 24  # that are changed one by one


class Experiments:
    """Runs of the step that differs, each with one thing changed."""

    def __init__(self, case: Case, step: int, found: StepRecord, expected: StepRecord) -> None:
        self._case, self._step = case, step
        self._gradients, self._whole = found.result.gradients, expected.result.gradients
        self._state = expected.before
        self._buffers = [
            name
            for name, b in expected.buffers.items()
            if not same({name: found.buffers[name]}, {name: b})
        ]

    def diagnose(self) -> Diagnosis:
        """Try one explanation after another."""
        names = tuple(self._whole)
        moved = [
            Probe(self._step, direction=direction, moved=names, amount=sign * _STEP)
            for direction in self._directions()
            for sign in (1, -1)
        ]
        other_batch = Probe(self._step + 1)
        ranks = self._on_ranks([Probe(self._step, sync_norms=True), other_batch, *moved])
        one = self._alone([Probe(self._step, another_seed=True), other_batch, *moved])
        if not same(one[0].gradients, self._whole):
            return self._random()
        if same(ranks[0].gradients, self._whole):
            return self._batch_norm()
        return (
            self._by_derivative(ranks[2:], one[2:])
            or self._by_other_batch(ranks[1], one[1])
            or self._by_rows()
        )

    def _random(self) -> Diagnosis:
        drops = [n for n, m in self._modules() if "Dropout" in type(m).__name__ and m.training]
        what = f"dropout differs ({', '.join(drops)})" if drops else "the step draws them"
        return Diagnosis(
            Mistake.RANDOM,
            f"{what}; with another seed one process gives other gradients too.",
            "Switch it off for this check, or draw one number for each row from a seed of its own.",
        )

    def _batch_norm(self) -> Diagnosis:
        kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
        norms = [name or "the model" for name, m in self._modules() if isinstance(m, kinds)]
        return Diagnosis(
            Mistake.LOCAL_BATCH_NORM,
            f"{', '.join(norms)}: each rank normalises by its own rows. With the statistics of all "
            "ranks the gradients are those of one process.",
            "Use allgrad.nn.convert(model).",
        )

    def _by_derivative(self, ranks: Sequence[Outcome], one: Sequence[Outcome]) -> Diagnosis | None:
        """Find the weight with which the gradient counts each rank's loss, by differences."""
        slopes, alone = _slopes(ranks), _slopes(one)
        if slopes is None or alone is None:
            return None
        if _misfit(alone, torch.ones(1).double(), self._along(self._whole)) > _CLOSE:
            return None  # what the step returns is not what it differentiates
        along = self._along(self._gradients)
        weights = torch.linalg.lstsq(slopes, along, driver="gelsd").solution
        if _misfit(slopes, weights, along) > _CLOSE:
            return Diagnosis(
                Mistake.DETACHED,
                "the gradients are not the derivative of the ranks' own losses. A part is lost on "
                "the way between ranks.",
                "Gather with gradient: ag.all_gather(x), not under no_grad, nor of a detached tensor.",
            )
        largest = float(weights.abs().max())
        without = [r for r, w in enumerate(weights.tolist()) if abs(w) < _CLOSE * 10 * largest]
        if without:
            return Diagnosis(
                Mistake.RANK_WITHOUT_GRADIENT,
                f"the loss of {ranks_text(without)} is not in the gradient.",
                "Call backward on every rank, with a loss that depends on the parameters.",
            )
        return None

    def _by_other_batch(self, ranks: Outcome, one: Outcome) -> Diagnosis | None:
        """Tell whether the difference is the same for another batch."""
        first = flat(self._gradients, self._whole) - flat(self._whole, self._whole)
        other = flat(ranks.gradients, one.gradients) - flat(one.gradients, one.gradients)
        if float((first - other).norm()) > 1e-6 * float(first.norm()):
            return None
        parameters = flat(self._state, self._whole)
        along = float(first @ parameters / (first.norm() * parameters.norm()).clamp(min=1e-300))
        decay = " It is proportional to the parameters: weight decay." if along > 1 - 1e-6 else ""
        return Diagnosis(
            Mistake.COUNTED_TWICE,
            f"the difference does not depend on the batch, as that of a regulariser.{decay}",
            "Count a term that every rank has once: scale it unlike the sums over rows.",
        )

    def _by_rows(self) -> Diagnosis:
        """Change rows: make batches equal, change single rows, hold the same rows on all ranks."""
        pieces = self._pieces_here()
        sizes = [rows_of(piece) for piece in pieces]
        rows = [(rank, row) for rank, size in enumerate(sizes) for row in range(size)]
        rows = rows[:: max(1, -(-len(rows) // _MOST_ROWS))]
        changes = [None, equal_sizes, equal_pieces, *(change_row(*row) for row in rows)]
        probes = [Probe(self._step, change=change) for change in changes]
        one, ranks = self._alone(probes), self._on_ranks(probes)
        equal = [same(a.gradients, b.gradients) for a, b in zip(ranks, one, strict=True)]
        if len(set(sizes)) > 1 and equal[1]:
            return Diagnosis(
                Mistake.UNEQUAL_BATCHES,
                f"with equal batches the gradients are those of one process; here they have {sizes} "
                "rows. Each rank takes the mean over its own rows.",
                "Divide the sum over a rank's rows by the rows of all ranks.",
            )
        unused = [
            row
            for row, a, b in zip(rows, ranks[3:], one[3:], strict=True)
            if _unmoved(a, ranks[0]) and not _unmoved(b, one[0])
        ]
        if unused:
            rank = unused[0][0]
            of_rank = [row for r, row in unused if r == rank]
            return _slice(f"rank {rank} does not use rows {of_rank} of its batch.")
        if self._buffers:
            return Diagnosis(
                Mistake.BUFFER,
                f"{', '.join(self._buffers)} is another than in one process, already in this step.",
                "Update it from the rows of all ranks, e.g. with ag.all_reduce.",
            )
        if equal[2]:
            return Diagnosis(
                Mistake.ORDER,
                "when all ranks hold the same rows the gradients are those of one process. A rank "
                "takes the rows of another rank for its own.",
                "Join in rank order (ag.all_gather does), and slice where the rank's rows start.",
            )
        return self._by_pairs(pieces, rows)

    def _by_pairs(self, pieces: list[object], rows: list[tuple[int, int]]) -> Diagnosis:
        """Find rows that are taken for other rows."""
        apart = [Probe(self._step, change=one_row_apart(*row)) for row in rows]
        leaves = [n for n, x in enumerate(tensors(pieces[0])) if x.dim()]
        rolls = [(leaf, by) for leaf in leaves for by in (1, -1)]
        rolled = [Probe(self._step, change=roll_tensor(*roll)) for roll in rolls]
        ranks, one = self._on_ranks(apart), self._alone([*apart, *rolled])
        for (leaf, by), outcome in zip(rolls, one[len(apart) :], strict=True):
            if same(self._gradients, outcome.gradients):
                name = split_tensors(pieces[0])[1].names("batch")[leaf]
                return _slice(f"the gradients are those of {name} rolled by {by} row.")
        telling = 1e-6 * float(flat(self._whole, self._whole).norm())
        if any(
            same(a.gradients, b.gradients)
            and float(flat(b.gradients, b.gradients).norm()) > telling
            for a, b in zip(ranks, one, strict=False)
        ):
            return _slice("rows are taken for other rows; where these are the same, all is equal.")
        return Diagnosis(
            Mistake.UNKNOWN,
            "the gradients are the derivative of the ranks' losses, which are another function of "
            "the rows than the loss of one process.",
            LOOK,
        )

    def _on_ranks(self, probes: Sequence[Probe]) -> list[Outcome]:
        return evaluate(self._case, self._case.ranks, self._state, probes)

    def _alone(self, probes: Sequence[Probe]) -> list[Outcome]:
        return evaluate(self._case, 1, self._state, probes)

    def _along(self, gradients: State) -> Tensor:
        """The slope that the gradients promise along each direction."""
        whole = flat(gradients, self._whole)
        ways = [random_direction(self._state, self._whole, d) for d in self._directions()]
        return torch.stack([whole @ flat(way, self._whole) for way in ways])

    def _directions(self) -> range:
        """A few more than there are ranks, so that weights that do not exist are not found."""
        return range(self._case.ranks + 3)

    def _modules(self) -> list[tuple[str, nn.Module]]:
        with torch.random.fork_rng(devices=[]):
            return list(self._case.make_model().named_modules())

    def _pieces_here(self) -> list[object]:
        with torch.random.fork_rng(devices=[]):
            return self._case.pieces(self._step)


def _slice(seen: str) -> Diagnosis:
    advice = "Take a rank's own rows: they start at the sum of the sizes of the ranks before it."
    return Diagnosis(Mistake.SLICE, seen, advice)


def _slopes(moved: Sequence[Outcome]) -> Tensor | None:
    """The slope of each rank's loss (columns) along each direction (rows)."""
    rows = []
    for ahead, behind in zip(moved[::2], moved[1::2], strict=True):
        pairs = list(zip(ahead.losses, behind.losses, strict=True))
        if any(a is None or b is None for a, b in pairs):
            return None
        rows.append([(a - b) / (2 * _STEP) for a, b in pairs if a is not None and b is not None])
    return torch.tensor(rows, dtype=torch.float64)


def _misfit(slopes: Tensor, weights: Tensor, along: Tensor) -> float:
    return float((slopes @ weights - along).norm() / along.norm().clamp(min=1e-300))


def _unmoved(changed: Outcome, plain: Outcome) -> bool:
    """Tell whether neither a loss nor a gradient has changed at all."""
    if changed.losses != plain.losses:
        return False
    return all(torch.equal(changed.gradients[name], g) for name, g in plain.gradients.items())
