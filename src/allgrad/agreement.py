"""What the ranks tell each other before a call: one small message of fixed, versioned layout.

Each rank sends one row of 64-bit words to every other:

    word  0        layout version
          1        the operation's number
          2        dtype's number
          3        number of dimensions
          4        the dimension the call is about
          5        a count for this very receiver (all_to_all)
          6        0, or the number of the error class this rank found in its own arguments
          7        bytes of text that follow in the last words (that error's message)
          8 - 31   shape
         32 - 95   text, UTF-8, padded with zeros

A rank that finds a mistake in its own arguments still takes part, so that everyone raises.
Nothing received is ever unpickled or evaluated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from allgrad import wire
from allgrad.errors import (
    AllgradError,
    GroupError,
    InputError,
    PieceMismatch,
    ReductionError,
    SizesError,
    TensorError,
    rank_table,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from allgrad.wire import Group

__all__ = ["DTYPES", "MAX_DIMS", "Announcement", "describe", "exchange", "require_alike"]

VERSION = 1
MAX_DIMS = 24
_FIXED = 8
_TEXT_WORDS = 64
_WORDS = _FIXED + MAX_DIMS + _TEXT_WORDS

OPERATIONS = (
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "gather",
    "scatter",
    "permute",
    "sizes",
)
_ERRORS: tuple[type[InputError], ...] = (
    InputError,
    TensorError,
    PieceMismatch,
    SizesError,
    ReductionError,
    GroupError,
)
DTYPES: tuple[torch.dtype, ...] = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.complex128, torch.complex64, torch.complex32),
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    torch.float8_e8m0fnu,
)


@dataclass(frozen=True, slots=True)
class Announcement:
    """What one rank is about to do, and with what."""

    op: str
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    dim: int
    count: int = 0
    problem: InputError | None = None

    def encode(self, count: int) -> list[int]:
        text = b"" if self.problem is None else _fitting(str(self.problem))
        padded = text.ljust(_TEXT_WORDS * 8, b"\0")
        return [
            VERSION,
            OPERATIONS.index(self.op),
            -1 if self.dtype is None else DTYPES.index(self.dtype),
            len(self.shape),
            self.dim,
            count,
            0 if self.problem is None else 1 + _error_number(self.problem),
            len(text),
            *self.shape,
            *[0] * (MAX_DIMS - len(self.shape)),
            *(
                int.from_bytes(padded[i : i + 8], "little", signed=True)
                for i in range(0, len(padded), 8)
            ),
        ]

    @staticmethod
    def decode(words: Sequence[int]) -> Announcement:
        """Read a row, checking every number before it is used."""
        if len(words) != _WORDS:
            raise AllgradError(f"A message of {len(words)} words came; {_WORDS} were expected.")
        version, op, dtype, ndim, dim, count, error, length = words[:_FIXED]
        if version != VERSION:
            raise AllgradError(
                f"A rank speaks version {version} of this message; this one speaks {VERSION}.\n"
                "Run the same allgrad on every rank, and the same collectives in the same order."
            )
        shape = tuple(words[_FIXED : _FIXED + max(0, ndim)])
        if (
            not 0 <= op < len(OPERATIONS)
            or not -1 <= dtype < len(DTYPES)
            or not 0 <= ndim <= MAX_DIMS
            or not 0 <= error <= len(_ERRORS)
            or not 0 <= length <= _TEXT_WORDS * 8
            or count < 0
            or any(length < 0 for length in shape)
        ):
            raise AllgradError("A message from another rank is garbled: a number is out of range.")
        raw = b"".join(w.to_bytes(8, "little", signed=True) for w in words[_FIXED + MAX_DIMS :])
        text = raw[:length].decode("utf-8", errors="replace")
        return Announcement(
            OPERATIONS[op],
            None if dtype < 0 else DTYPES[dtype],
            shape,
            dim,
            count,
            _ERRORS[error - 1](text) if error else None,
        )


def _fitting(text: str) -> bytes:
    """Encode as much of the text as fits, without cutting a character in two."""
    return text.encode()[: _TEXT_WORDS * 8].decode(errors="ignore").encode()


def _error_number(problem: InputError) -> int:
    return _ERRORS.index(type(problem)) if type(problem) in _ERRORS else 0


def exchange(
    group: Group,
    mine: Announcement,
    device: torch.device,
    counts: Sequence[int] | None = None,
) -> list[Announcement]:
    """Tell every rank and hear from all; raise on every rank when any of them found a problem.

    ``counts[r]`` is a number for rank ``r`` alone.
    """
    if group.size == 1:
        if mine.problem is not None:
            raise mine.problem
        return [mine if counts is None else replace(mine, count=counts[0])]
    where = wire.message_device(group, device)
    rows = [mine.encode(0 if counts is None else counts[rank]) for rank in range(group.size)]
    flat = torch.tensor(rows, dtype=torch.int64, device=where).view(-1)
    each = [_WORDS] * group.size
    heard = wire.all_to_all(group, flat, each, each).view(group.size, _WORDS).tolist()
    all_ranks = [Announcement.decode(row) for row in heard]
    _raise_problems(mine, all_ranks)
    return all_ranks


def _raise_problems(mine: Announcement, heard: Sequence[Announcement]) -> None:
    if all(a.problem is None for a in heard):
        return
    marks = {
        rank: str(a.problem).partition("\n")[0].removeprefix(f"{a.op}: ")
        for rank, a in enumerate(heard)
        if a.problem is not None
    }
    first = heard[min(marks)].problem
    assert first is not None
    rule, _, advice = str(first).partition("\n")
    kind = type(first if mine.problem is None else mine.problem)
    raise kind(rank_table(rule, [describe(a) for a in heard], marks, advice))


def describe(a: Announcement) -> str:
    """One rank's line in a table: its shape and dtype."""
    if a.dtype is None:
        return f"{a.shape}" if a.shape else "no tensor"
    return f"{a.shape} {str(a.dtype).removeprefix('torch.')}"


def require_alike(
    heard: Sequence[Announcement],
    what: Callable[[Announcement], object],
    rule: str,
    mark: Callable[[Announcement, Announcement], str],
    advice: str,
    *,
    error: type[InputError] = PieceMismatch,
    row: Callable[[Announcement], str] = describe,
) -> None:
    """Raise, on every rank alike, unless ``what`` is the same for all.

    The odd ones are those that differ from what most ranks have.
    """
    values = [what(a) for a in heard]
    usual = max(values, key=values.count)
    if all(value == usual for value in values):
        return
    model = heard[values.index(usual)]
    marks = {rank: mark(a, model) for rank, a in enumerate(heard) if values[rank] != usual}
    raise error(rank_table(rule, [row(a) for a in heard], marks, advice))
