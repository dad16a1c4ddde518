"""What the ranks tell each other of their routing: arguments that fit, and choices by expert."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from allgrad._autograd.transforms import is_plain_autograd
from allgrad._wire.codec import DTYPES
from allgrad.collectives.all_to_all import all_to_all
from allgrad.errors import InputError, PieceMismatch, TensorError, rank_table

if TYPE_CHECKING:
    from torch import Tensor

    from allgrad.nn._ranks import Place
    from allgrad.nn._routes import Counts
    from allgrad.types import GroupLike

__all__ = ["Options", "choices_in_order", "exchange_counts"]

_DTYPES = {dtype: code for code, dtype in enumerate(DTYPES)}
_FACTS = 13


class Options(NamedTuple):
    """The arguments that must be the same on every rank."""

    held: tuple[int, ...]
    capacity: int | None
    drop: bool

    def row(self) -> list[int]:
        return [hash(self.held), -1 if self.capacity is None else self.capacity, self.drop]


def choices_in_order(x: Tensor, routing: Tensor, number: int) -> tuple[Any, Any, Tensor]:
    """The least and the greatest choice, the choices of each expert, and their order by expert.

    On the host, by numpy: it sorts short integers by counting. Choices of no expert are at the end
    of the order; there is no choice where the arguments do not fit.
    """
    good = x.dim() == 2 and routing.dim() in {1, 2} and len(routing) == len(x)
    whole = not routing.is_floating_point() and not routing.is_complex()
    chosen = routing.reshape(-1) if good and whole else routing.new_zeros(0, dtype=torch.int64)
    if not (chosen.is_cpu and is_plain_autograd()):
        return _on_device(chosen, number)
    found = chosen.numpy().astype(np.int64, copy=False)
    low, high = (int(found.min()), int(found.max())) if len(found) else (-1, -1)
    if low < 0 or high >= number:
        found = np.where((found >= 0) & (found < number), found, number)
    counts = np.bincount(found, minlength=number + 1)[:number]
    short = found.astype(np.int16) if number < np.iinfo(np.int16).max else found
    return [low, high], counts.tolist(), torch.from_numpy(np.argsort(short, kind="stable"))


def _on_device(chosen: Tensor, number: int) -> tuple[Any, Any, Tensor]:
    expert = torch.where((chosen >= 0) & (chosen < number), chosen, number)
    counts = torch.bincount(expert, minlength=number + 1)[:number]
    span = counts.new_full((2,), -1)
    if len(chosen):
        span = torch.stack(torch.aminmax(chosen)).long()
    return span, counts, expert.argsort(stable=True)


def exchange_counts(  # noqa: PLR0917
    x: Tensor,
    routing: Tensor,
    options: Options,
    found: tuple[Any, Any],
    place: Place,
    group: GroupLike,
) -> Counts:
    """How many choices of each rank fall on each expert. A mistake of one rank raises on all."""
    (span, counts), number = found, sum(options.held)
    shapes = [x.dim(), *_two(x), routing.dim(), *_two(routing), int(routing.is_floating_point())]
    facts = [*shapes, *options.row(), _DTYPES.get(x.dtype, -1)]
    if isinstance(span, list):
        row = torch.tensor([*span, *facts, *counts], device=x.device)
    else:
        row = torch.cat([span, span.new_tensor(facts), counts]).to(x.device)
    if place.world == 1:
        rows = row[None].cpu()
    else:
        # Few words: with fewer cores than ranks they go by way of a root, else in one step.
        copies = row.expand(place.world, -1)
        rows = all_to_all(copies, send_sizes="equal", group=group, grad="none").cpu()
    _require_fitting(rows[:, :_FACTS].tolist(), number)
    found_counts: Counts = rows[:, _FACTS:].numpy()
    return found_counts


def _require_fitting(facts: list[list[int]], number: int) -> None:
    """Check what the ranks told of their arguments; every rank sees the same."""
    marks = {
        rank: "do not fit"
        for rank, f in enumerate(facts)
        if f[2] != 2 or f[5] not in {1, 2} or f[3] != f[6] or f[8]
    }
    if marks:
        raise TensorError(
            rank_table(
                "dispatch: x is (tokens, features), and routing has whole numbers for each token.",
                [f"x {tuple(f[3:5][: f[2]])}, routing {tuple(f[6:8][: f[5]])}" for f in facts],
                marks,
                "Give routing of shape (tokens) or (tokens, choices).",
            )
        )
    marks = {rank: "unknown" for rank, f in enumerate(facts) if f[0] < -1 or f[1] >= number}
    if marks:
        raise InputError(
            rank_table(
                f"dispatch: there are experts 0 to {number - 1}, and -1 for none.",
                [f"routing from {f[0]} to {f[1]}" for f in facts],
                marks,
                "Route to experts that some rank holds.",
            )
        )
    kinds = [(f[4], *f[9:]) for f in facts]
    usual = max(kinds, key=kinds.count)
    odd = {rank: "differs" for rank, kind in enumerate(kinds) if kind != usual}
    if odd:
        raise PieceMismatch(
            rank_table(
                "dispatch: tokens of all ranks have one width and dtype, the ranks the same options.",
                [
                    f"{f[4]} features {_dtype(f[12])}, capacity={f[10]}, drop={bool(f[11])}"
                    for f in facts
                ],
                odd,
                "Give every rank the same features, dtype, experts=, capacity= and drop=.",
            )
        )


def _dtype(code: int) -> str:
    return str(DTYPES[code]).removeprefix("torch.") if 0 <= code < len(DTYPES) else "other"


def _two(x: Tensor) -> tuple[int, int]:
    shape = (*x.shape, 0, 0)
    return shape[0], shape[1]
