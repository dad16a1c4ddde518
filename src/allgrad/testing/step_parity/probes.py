"""Experiments at the step that differs: the same state, with one thing changed at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from allgrad._wire.world import rank_of
from allgrad.containers.nests import map_tensors, split_tensors, tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from allgrad.testing.step_parity.case import Case, State

__all__ = [
    "Outcome",
    "Probe",
    "change_row",
    "equal_pieces",
    "equal_sizes",
    "evaluate",
    "one_row_apart",
    "random_direction",
    "roll_tensor",
    "rows_of",
]


@dataclass(frozen=True, slots=True)
class Probe:
    """One evaluation of the step, with what differs from the step that was recorded."""

    step: int
    change: Callable[[list[Any]], list[Any]] | None = None  # of the pieces
    another_seed: bool = False
    sync_norms: bool = False
    direction: int = 0  # a seed: along which the parameters ``moved`` are moved
    moved: tuple[str, ...] = ()
    amount: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The losses of all ranks, and the gradients of rank 0."""

    losses: tuple[float | None, ...]
    gradients: State


def evaluate(case: Case, world: int, state: State, probes: Sequence[Probe]) -> list[Outcome]:
    """Evaluate each probe from ``state``, on the ranks of the case or in a world of one."""
    by_rank = case.run(_evaluate_here, world, state, probes)
    return [
        Outcome(tuple(loss for loss, _ in outcomes), outcomes[0][1])
        for outcomes in zip(*by_rank, strict=True)
    ]


def _evaluate_here(
    case: Case, state: State, probes: Sequence[Probe]
) -> list[tuple[float | None, State]]:
    found: list[tuple[float | None, State]] = []
    with case.precision():
        for probe in probes:
            model = case.build(_moved(state, probe), sync_norms=probe.sync_norms)
            pieces = case.pieces(probe.step)
            if probe.change is not None:
                pieces = probe.change(pieces)
            seed = probe.step + (case.steps if probe.another_seed else 0)
            result = case.evaluate(model, case.own_batch(pieces), seed)
            found.append((result.loss, result.gradients if rank_of() == 0 else {}))
    return found


def _moved(state: State, probe: Probe) -> State:
    direction = random_direction(state, probe.moved, probe.direction)
    moved = {name: state[name] + probe.amount * step for name, step in direction.items()}
    return {**state, **moved}


def random_direction(state: State, names: Iterable[str], seed: int) -> State:
    """Random numbers in the shapes of these parameters."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(state[name].shape, generator=generator, dtype=state[name].dtype)
        for name in names
    }


def rows_of(piece: Any) -> int:
    """The number of rows: the length of the first tensor that has dimensions."""
    return next((len(x) for x in tensors(piece) if x.dim()), 0)


def equal_sizes(pieces: list[Any]) -> list[Any]:
    """Pieces of as many rows as the largest has; short ones start again with their first row."""
    most = max(map(rows_of, pieces))
    full = [piece for piece in pieces if rows_of(piece)]
    return [
        _take_rows(full[rank % len(full)] if not rows_of(piece) else piece, range(most))
        for rank, piece in enumerate(pieces)
    ]


def equal_pieces(pieces: list[Any]) -> list[Any]:
    """The first piece that has rows, on every rank."""
    first = next((piece for piece in pieces if rows_of(piece)), pieces[0])
    return [first] * len(pieces)


def one_row_apart(rank: int, row: int) -> Callable[[list[Any]], list[Any]]:
    """Make all rows of all ranks the same, but one."""

    def change(pieces: list[Any]) -> list[Any]:
        first = next(piece for piece in pieces if rows_of(piece))
        changed = [_take_rows(first, [0] * rows_of(piece)) for piece in pieces]
        return change_row(rank, row)(changed)

    return change


def roll_tensor(number: int, rows: int) -> Callable[[list[Any]], list[Any]]:
    """Move the rows of one tensor of the joined batch on, across the ranks."""

    def change(pieces: list[Any]) -> list[Any]:
        columns = [tensors(piece) for piece in pieces]
        column = [leaves[number] for leaves in columns]
        rolled = torch.cat(column).roll(rows, 0).split([len(x) for x in column])
        frames = [split_tensors(piece)[1] for piece in pieces]
        return [
            frame([*leaves[:number], own, *leaves[number + 1 :]])
            for frame, leaves, own in zip(frames, columns, rolled, strict=True)
        ]

    return change


def change_row(rank: int, row: int) -> Callable[[list[Any]], list[Any]]:
    """Another row ``row`` on rank ``rank``: scaled numbers, or where there are none, the next row."""

    def change(pieces: list[Any]) -> list[Any]:
        piece = pieces[rank]
        floating = any(x.is_floating_point() for x in tensors(piece) if x.dim())
        return [*pieces[:rank], map_tensors(in_row(floating), piece), *pieces[rank + 1 :]]

    def in_row(floating: bool) -> Callable[[Tensor], Tensor]:
        def changed(x: Tensor) -> Tensor:
            if not x.dim() or row >= len(x) or floating != x.is_floating_point():
                return x
            x = x.clone()
            x[row] = x[row] * 1.25 + 0.125 if floating else x[(row + 1) % len(x)]
            return x

        return changed

    return change


def _take_rows(piece: Any, rows: Sequence[int]) -> Any:
    def taken(x: Tensor) -> Tensor:
        return x[[row % len(x) for row in rows]] if x.dim() and len(x) else x

    return map_tensors(taken, piece)
