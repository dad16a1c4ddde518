"""What the ranks tell each other before a call: one small message of fixed, versioned layout.

Each rank sends one row of 96 words of 64 bits to every other:

    word  0        layout version
          1        the operation's number
          2        how many tensors the call brings
          3        a hash of their names in the nest
          4        words about the tensors
          5        0, or the number of the error class this rank found in its own arguments
          6        bytes of that error's text
          7 -      the words about the tensors, then the text in UTF-8

About each tensor: its dtype's number, its number of dimensions, the dim the call is about, an amount
for this very receiver, and its shape. A nest of many tensors may need more words than a row has:
the rest follows in a second message, whose length all ranks then know.

A rank that finds a mistake in its own arguments still takes part, so that everyone raises.
Nothing received is ever unpickled or evaluated.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from allgrad._wire import primitives as wire
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

    from allgrad._wire.primitives import Group

__all__ = [
    "DTYPES",
    "MAX_DIMS",
    "Announcement",
    "Brought",
    "exchange",
    "hash_names",
    "require_alike",
    "text_fitting",
    "text_of",
    "text_words",
]

VERSION = 1
MAX_DIMS = 24
ROW = 96
_FIXED = 7
_BODY = ROW - _FIXED
_MOST_TENSORS = 1 << 20

OPERATIONS = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter", "permute", "sizes")
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
    *([torch.float8_e8m0fnu] if hasattr(torch, "float8_e8m0fnu") else []),  # torch 2.7
)


class Brought(NamedTuple):
    """One tensor that a rank brings to a call."""

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    dim: int
    amount: int = 0

    def __str__(self) -> str:
        if self.dtype is None:
            return f"{self.shape}" if self.shape else "no tensor"
        return f"{self.shape} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True, slots=True)
class Announcement:
    """What one rank is about to do, and with what."""

    op: str
    tensors: tuple[Brought, ...]
    names: int = 0
    problem: InputError | None = None

    def encode(self) -> list[int]:
        """The row, and whatever about the tensors it cannot hold."""
        about = [word for tensor in self.tensors for word in _tensor_words(tensor)]
        text = b""
        if self.problem is not None:
            text = text_fitting(str(self.problem), (_BODY - len(about)) * 8)
        error = 0 if self.problem is None else 1 + _error_number(self.problem)
        fixed = (VERSION, OPERATIONS.index(self.op), len(self.tensors), self.names)
        row = [*fixed, len(about), error, len(text), *about, *text_words(text)]
        return row + [0] * (ROW - len(row))

    @staticmethod
    def decode(words: Sequence[int]) -> Announcement:
        """Read what ``encode`` wrote, checking every number before it is used."""
        fixed = Fixed.decode(words)
        about, text = words[_FIXED : _FIXED + fixed.about], words[_FIXED + fixed.about :]
        if len(about) != fixed.about or len(text) * 8 < fixed.text:
            raise _garbled()
        tensors: list[Brought] = []
        while len(tensors) < fixed.tensors:
            if len(about) < 4:
                raise _garbled()
            dtype, ndim, dim, amount = about[:4]
            shape = tuple(about[4 : 4 + max(0, ndim)])
            about = about[4 + max(0, ndim) :]
            if (
                not -1 <= dtype < len(DTYPES)
                or not 0 <= ndim <= MAX_DIMS
                or len(shape) != ndim
                or not 0 <= dim < MAX_DIMS
                or amount < 0
                or any(n < 0 for n in shape)
            ):
                raise _garbled()
            tensors.append(Brought(None if dtype < 0 else DTYPES[dtype], shape, dim, amount))
        if about:
            raise _garbled()
        problem = None
        if fixed.error:
            problem = _ERRORS[fixed.error - 1](text_of(text, fixed.text))
        return Announcement(OPERATIONS[fixed.op], tuple(tensors), fixed.names, problem)


class Fixed(NamedTuple):
    """The numbers at the front of every row."""

    version: int
    op: int
    tensors: int
    names: int
    about: int
    error: int
    text: int

    @staticmethod
    def decode(words: Sequence[int]) -> Fixed:
        if len(words) < ROW:
            raise AllgradError(f"A message of {len(words)} words came; {ROW} were expected.")
        fixed = Fixed(*words[:_FIXED])
        if fixed.version != VERSION:
            raise AllgradError(
                f"A rank speaks version {fixed.version} of this message, this one {VERSION}.\n"
                "Run the same allgrad on every rank, and the same collectives in the same order."
            )
        if (
            not 0 <= fixed.op < len(OPERATIONS)
            or not 0 <= fixed.tensors <= _MOST_TENSORS
            or not 0 <= fixed.about <= fixed.tensors * (4 + MAX_DIMS)
            or not 0 <= fixed.error <= len(_ERRORS)
            or not 0 <= fixed.text <= _BODY * 8
        ):
            raise _garbled()
        return fixed


def _garbled() -> AllgradError:
    return AllgradError("A message from another rank is garbled: a number is out of range.")


def _tensor_words(t: Brought) -> tuple[int, ...]:
    dtype = -1 if t.dtype is None else DTYPES.index(t.dtype)
    return (dtype, len(t.shape), t.dim, t.amount, *t.shape)


def text_fitting(text: str, most: int) -> bytes:
    """Encode as much of the text as fits, without cutting a character in two."""
    return text.encode(errors="replace")[:most].decode(errors="ignore").encode()


def text_words(text: bytes, words: int = 0) -> list[int]:
    """Text in words of 64 bits, at least so many."""
    padded = text.ljust(words * 8, b"\0") + b"\0" * (-len(text) % 8 if len(text) > words * 8 else 0)
    return [
        int.from_bytes(padded[i : i + 8], "little", signed=True) for i in range(0, len(padded), 8)
    ]


def text_of(words: Sequence[int], length: int) -> str:
    """Read text of so many bytes."""
    raw = b"".join(word.to_bytes(8, "little", signed=True) for word in words)[:length]
    return raw.decode("utf-8", errors="replace")


def _error_number(problem: InputError) -> int:
    return _ERRORS.index(type(problem)) if type(problem) in _ERRORS else 0


def hash_names(names: Sequence[str]) -> int:
    """A number that differs when the names of a nest's tensors do."""
    digest = hashlib.blake2b("\n".join(names).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def exchange(
    group: Group,
    mine: Announcement,
    device: torch.device,
    counts: Sequence[Sequence[int]] | None = None,
) -> list[Announcement]:
    """Tell every rank and hear from all; raise on every rank when any of them found a problem.

    ``counts[i][r]`` is a number about tensor ``i`` for rank ``r`` alone.
    """
    rows = [_for_receiver(mine, counts, rank).encode() for rank in range(group.size)]
    if group.size == 1:
        heard = rows
    else:
        heard = _send(group, [row[:ROW] for row in rows], [ROW] * group.size, device, equal=True)
        rest = [max(0, Fixed.decode(row).about - _BODY) for row in heard]
        if any(rest):
            more = _send(group, [row[ROW:] for row in rows], rest, device)
            heard = [row + tail for row, tail in zip(heard, more, strict=True)]
    ranks = [Announcement.decode(row) for row in heard]
    _raise_problems(mine, ranks)
    return ranks


def _for_receiver(
    mine: Announcement, counts: Sequence[Sequence[int]] | None, rank: int
) -> Announcement:
    if counts is None:
        return mine
    told = (t._replace(amount=c[rank]) for t, c in zip(mine.tensors, counts, strict=True))
    return Announcement(mine.op, tuple(told), mine.names, mine.problem)


def _send(
    group: Group,
    rows: list[list[int]],
    lengths: list[int],
    device: torch.device,
    *,
    equal: bool = False,
) -> list[list[int]]:
    where = wire.message_device(group, device)
    flat = torch.tensor([word for row in rows for word in row], dtype=torch.int64, device=where)
    sent = [len(row) for row in rows]
    got: list[int] = wire.all_to_all(group, flat, sent, lengths, equal=equal).tolist()
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return [got[start : start + n] for start, n in zip(starts, lengths, strict=True)]


def _raise_problems(mine: Announcement, heard: Sequence[Announcement]) -> None:
    problems = {rank: a.problem for rank, a in enumerate(heard) if a.problem is not None}
    if not problems:
        return
    if len(heard) == 1:
        raise next(iter(problems.values()))
    marks = {
        rank: str(problem).partition("\n")[0].removeprefix(f"{heard[rank].op}: ")
        for rank, problem in problems.items()
    }
    first = problems[min(problems)]
    rule, _, advice = str(first).partition("\n")
    kind = type(first if mine.problem is None else mine.problem)
    rows = [", ".join(str(t) for t in a.tensors[:3]) or "no tensor" for a in heard]
    raise kind(rank_table(rule, rows, marks, advice))


def require_alike(
    heard: Sequence[object],
    rows: Sequence[str],
    rule: str,
    mark: Callable[[int, int], str],
    advice: str,
    *,
    error: type[InputError] = PieceMismatch,
) -> None:
    """Raise, on every rank alike, unless all ranks said the same.

    The odd ones are those that differ from most; ``mark(odd, usual)`` says how, by their ranks.
    """
    usual = max(heard, key=heard.count)
    if all(value == usual for value in heard):
        return
    model = heard.index(usual)
    marks = {rank: mark(rank, model) for rank, value in enumerate(heard) if value != usual}
    raise error(rank_table(rule, rows, marks, advice))
