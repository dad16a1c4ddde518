"""What the ranks tell each other of their routing: arguments that fit, and choices by expert."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from allgrad._autograd.below_transforms import below_transforms
from allgrad._autograd.transforms import is_plain_autograd
from allgrad._core.torch_internals import functorch_active
from allgrad._wire import primitives as wire
from allgrad._wire.codec import DTYPES
from allgrad.collectives.all_to_all import all_to_all
from allgrad.errors import InputError, PieceMismatch, TensorError, rank_table
from allgrad.nn._first_message import MOST, Row, can_carry, exchange

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from allgrad._wire.primitives import Call
    from allgrad.nn._first_message import Arrived
    from allgrad.nn._routes import Counts
    from allgrad.types import GroupLike

__all__ = ["Found", "Options", "choices_in_order", "exchange_counts"]

_FEW = 1024  # choices; more are sorted faster as short integers
_DTYPES = {dtype: code for code, dtype in enumerate(DTYPES)}


class Options(NamedTuple):
    """The arguments that must be the same on every rank."""

    held: tuple[int, ...]
    capacity: int | None
    drop: bool

    def row(self) -> list[int]:
        return [hash(self.held), -1 if self.capacity is None else self.capacity, self.drop]


class Found(NamedTuple):
    """The least and the greatest choice, the choices of each expert, and their order by expert.

    Numbers are lists, or a tensor on a device. Choices of no expert are at the end of the order.
    """

    span: Any
    counts: Any
    order: Tensor


def choices_in_order(x: Tensor, routing: Tensor, number: int) -> Found:
    """Sort the choices: on the host by numpy, which sorts short integers by counting.

    There is no choice where the arguments do not fit.
    """
    good = x.dim() == 2 and routing.dim() in {1, 2} and routing.shape[0] == x.shape[0]
    if good and _has_whole_numbers(routing):
        chosen = routing if routing.dim() == 1 else routing.reshape(-1)
    else:
        chosen = routing.new_zeros(0, dtype=torch.int64)
    if not (chosen.is_cpu and is_plain_autograd()):
        return _on_device(chosen, number)
    found = chosen.numpy()
    if found.dtype != np.int64:
        found = found.astype(np.int64)
    try:
        counted = np.bincount(found + 1, minlength=number + 1)
    except (ValueError, MemoryError):  # less than -1, or far above
        counted = found[:0]
    if len(counted) == number + 1:
        counts = counted.tolist()
        used = [expert for expert, n in enumerate(counts, -1) if n] or [-1]
        low, high = used[0], used[-1]
    else:
        low, high = int(found.min()), int(found.max())
        found = np.where((found >= 0) & (found < number), found, -1)
        counts = np.bincount(found + 1, minlength=number + 1).tolist()
    if len(found) > _FEW and number < np.iinfo(np.int16).max:
        found = found.astype(np.int16)
    order = found.argsort(kind="stable")
    if counts[0]:
        order = order[counts[0] :]
    return Found([low, high], counts[1:], torch.from_numpy(order))


def _on_device(chosen: Tensor, number: int) -> Found:
    expert = torch.where((chosen >= 0) & (chosen < number), chosen, number)
    counts = torch.bincount(expert, minlength=number + 1)[:number]
    span = counts.new_full((2,), -1)
    if len(chosen):
        span = torch.stack(torch.aminmax(chosen)).long()
    return Found(span, counts, expert.argsort(stable=True))


class _Facts(NamedTuple):
    """What a rank tells of its arguments: six numbers that are alike on every rank, and the rest."""

    fits: int
    width: int
    held: int
    capacity: int
    drop: int
    dtype: int
    low: int
    high: int
    dims: int
    rows: int
    routing_dims: int
    routing_rows: int
    choices: int
    whole: int

    @classmethod
    def of(cls, x: Tensor, routing: Tensor, options: Options, span: tuple[int, int]) -> _Facts:
        dims, (rows, width) = x.dim(), _two(x)
        alike = width, *options.row(), _DTYPES.get(x.dtype, -1)
        about = dims, rows, routing.dim(), *_two(routing), int(_has_whole_numbers(routing))
        found = cls._make([1, *alike, *span, *about])
        known = found.low >= -1 and found.high < sum(options.held)
        return found if known and found.is_fitting() else found._replace(fits=0)

    def is_fitting(self) -> bool:
        of_rows = self.dims == 2 and self.routing_dims in {1, 2} and self.rows == self.routing_rows
        return of_rows and bool(self.whole)


def exchange_counts(  # noqa: PLR0917
    call: Call, x: Tensor, routing: Tensor, options: Options, found: Found, group: GroupLike
) -> tuple[Counts, Arrived | None]:
    """How many choices of each rank fall on each expert. A mistake of one rank raises on all.

    On one host, where the rows of all ranks are few, they are sent along.
    """
    number = sum(options.held)
    plain = is_plain_autograd()  # inside torch.func new tensors have no memory of their own
    if plain and wire.goes_unsized(call, x) and 8 * (number + 2 * len(_Facts._fields)) < MOST:
        (low, high), counts = _on_host(found.span), _on_host(found.counts)
        facts = _Facts.of(x, routing, options, (low, high))
        chosen = None
        if facts.fits and can_carry(x, options.capacity):
            chosen = _rows_by_rank(counts, options.held, found.order, facts.choices)
        told, by_rank, arrived = exchange(call, x, Row(facts, counts), chosen)
        if told is not None:
            _require_fitting([_Facts._make(row) for row in told], number)
        return by_rank, arrived
    # What is on a device stays there: the range of choices is filled in as a tensor.
    span, by_expert = (torch.as_tensor(v, device=x.device) for v in (found.span, found.counts))
    facts = _Facts.of(x, routing, options, (0, 0))
    row = torch.cat([span.new_tensor(facts), by_expert])
    row[6:8] = span
    if call.size == 1:
        rows = row[None].cpu()
    else:
        rows = _rows_of_all(call, row, group)
    words = len(_Facts._fields)
    _require_fitting([_Facts._make(row) for row in rows[:, :words].tolist()], number)
    # Not by Tensor.numpy, which there is none of inside torch.func (test_forward_mode_and_func).
    table: Counts = np.array(rows[:, words:].tolist(), np.int64).reshape(call.size, number)
    return table, None


def _rows_of_all(call: Call, row: Tensor, group: GroupLike) -> Tensor:
    """Each rank's row. Inside torch.func by way of the host: there, a result would be one of the transform."""

    def exchanged(row: Tensor) -> Tensor:
        # Few words: with fewer cores than ranks they go by way of a root, else in one step.
        copies = row.expand(call.size, -1)
        return all_to_all(copies, send_sizes="equal", group=group, grad="none").cpu()

    if not functorch_active():
        return exchanged(row)
    words, device = row.tolist(), row.device
    return below_transforms(lambda: exchanged(torch.tensor(words, device=device)))


def _rows_by_rank(
    counts: list[int], held: Sequence[int], order: Tensor, choices: int
) -> tuple[Any, list[int]]:
    """The rows that go to each rank, one rank after the other, and where those of each end."""
    ends = list(accumulate(counts, initial=0))
    rows = order.numpy()
    return rows // choices if choices > 1 else rows, [
        ends[at] for at in accumulate(held, initial=0)
    ]


def _on_host(numbers: Any) -> list[int]:
    found: list[int] = numbers if isinstance(numbers, list) else numbers.tolist()
    return found


def _require_fitting(facts: Sequence[_Facts], number: int) -> None:
    """Check what the ranks told of their arguments; every rank sees the same."""
    marks = {rank: "do not fit" for rank, f in enumerate(facts) if not f.is_fitting()}
    if marks:
        raise TensorError(
            rank_table(
                "dispatch: x is (tokens, features), and routing has whole numbers for each token.",
                [
                    f"x {(f.rows, f.width)[: f.dims]}, "
                    f"routing {(f.routing_rows, f.choices)[: f.routing_dims]}"
                    for f in facts
                ],
                marks,
                "Give routing as int64, of shape (tokens) or (tokens, choices).",
            )
        )
    marks = {rank: "unknown" for rank, f in enumerate(facts) if f.low < -1 or f.high >= number}
    if marks:
        raise InputError(
            rank_table(
                f"dispatch: there are experts 0 to {number - 1}, and -1 for none.",
                [f"routing from {f.low} to {f.high}" for f in facts],
                marks,
                "Route to experts that some rank holds.",
            )
        )
    kinds = [f[1:6] for f in facts]
    usual = max(kinds, key=kinds.count)
    odd = {rank: "differs" for rank, kind in enumerate(kinds) if kind != usual}
    if odd:
        raise PieceMismatch(
            rank_table(
                "dispatch: tokens of all ranks have one width and dtype, the ranks the same options.",
                [
                    f"{f.width} features {_dtype(f.dtype)}, capacity={f.capacity}, drop={bool(f.drop)}"
                    for f in facts
                ],
                odd,
                "Give every rank the same features, dtype, experts=, capacity= and drop=.",
            )
        )


def _dtype(code: int) -> str:
    return str(DTYPES[code]).removeprefix("torch.") if 0 <= code < len(DTYPES) else "other"


def _has_whole_numbers(routing: Tensor) -> bool:
    """A mask is refused: read as numbers, it would choose experts 0 and 1."""
    is_mask = routing.dtype == torch.bool
    return not (is_mask or routing.is_floating_point() or routing.is_complex())


def _two(x: Tensor) -> tuple[int, int]:
    shape = (*x.shape, 0, 0)
    return shape[0], shape[1]
