"""What the ranks tell each other before a call whose sizes they do not know: one row each.

Behind the codec's header a row of 96 words has

    word  2        the operation
          3        words of the whole message
          4        tensors of the call
          5        hash of their names in the nest
          6        src or dst, + 1
          7        0, or the class of the error that this rank found in its own arguments
          8 -      for each tensor: dtype, dim, amount, number of dimensions, shape
                   then the text of the error

A nest of many tensors may need more words than a row has: the rest follows in a second message,
whose length all ranks then know. The ``amount`` may differ by receiver (all_to_all, scatter).

When all is well, rows differ only in the lengths and amounts that the call asks for, which one
comparison of the whole table tells; a row is decoded only to say what is wrong with it. A rank
that finds a mistake in its own arguments still takes part, so that every rank raises.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from allgrad._wire import primitives as wire
from allgrad._wire.codec import DTYPES, MAX_DIMS, Reader, Writer, dtype_name
from allgrad.errors import (
    GroupError,
    InputError,
    PieceMismatch,
    ReductionError,
    SizesError,
    TensorError,
    rank_table,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from allgrad._wire.calls import Call

__all__ = [
    "DTYPES",
    "MAX_DIMS",
    "Exchange",
    "RankArgs",
    "TensorSpec",
    "exchange",
    "hash_names",
]

ROW = 96
_LENGTH = 3  # the word with the length of the message
_FIXED = 8
_SPEC = 4  # words of a tensor before its shape
_MOST_TENSORS = 1 << 20

OPERATIONS = (
    *("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter", "permute"),
    "gather_sizes",
)
_ERRORS: tuple[type[InputError] | None, ...] = (
    *(None, InputError, TensorError, PieceMismatch),
    *(SizesError, ReductionError, GroupError),
)


class TensorSpec(NamedTuple):
    """One tensor of a call."""

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    dim: int
    amount: int = 0

    def __str__(self) -> str:
        if self.dtype is None:
            return f"{self.shape}" if self.shape else "no tensor"
        return f"{self.shape} {dtype_name(self.dtype)}"


@dataclass(frozen=True, slots=True)
class RankArgs:
    """The arguments of one rank: the call, its tensors, and what is wrong with them."""

    operation: str
    tensors: tuple[TensorSpec, ...]
    names: int = 0
    root: int = -1
    problem: InputError | None = None

    def encode(self) -> list[int]:
        """The row, and whatever about the tensors does not fit into it."""
        writer = Writer("handshake")
        writer.choice(self.operation, OPERATIONS)
        length = _FIXED + sum(_SPEC + len(spec.shape) for spec in self.tensors)
        kind = type(self.problem) if type(self.problem) in _ERRORS else InputError
        error = 0 if self.problem is None else _ERRORS.index(kind)
        writer.number(length, len(self.tensors), self.names, self.root + 1, error)
        for spec in self.tensors:
            writer.dtype(spec.dtype)
            writer.number(spec.dim, spec.amount, len(spec.shape), *spec.shape)
        if self.problem is not None:
            writer.text(str(self.problem), max(0, (ROW - length - 1) * 8))
        return writer.padded(max(ROW, len(writer.words)))

    @staticmethod
    def decode(words: Sequence[int], sender: int) -> RankArgs:
        """Read what ``encode`` wrote, checking every number before it is used."""
        reader = Reader(words, "handshake", sender)
        operation = reader.choice(OPERATIONS)
        reader.number(_FIXED)
        count = reader.number(0, _MOST_TENSORS)
        names = reader.number(-(2**63))
        root, error = reader.number() - 1, reader.choice(_ERRORS)
        specs = []
        for _ in range(count):
            dtype, dim, amount = reader.dtype(), reader.number(0, MAX_DIMS), reader.number()
            specs.append(TensorSpec(dtype, reader.shape(), dim, amount))
            if dim >= max(1, len(specs[-1].shape)):
                raise reader.damaged()
        problem = None if error is None else error(reader.text(ROW * 8))
        return RankArgs(operation, tuple(specs), names, root, problem)

    def __str__(self) -> str:
        return ", ".join(str(spec) for spec in self.tensors[:3]) or "no tensor"


def hash_names(names: Sequence[str]) -> int:
    """A number that differs when the names of a nest's tensors do."""
    digest = hashlib.blake2b("\n".join(names).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


@lru_cache(maxsize=1024)
def _template(args: RankArgs) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The encoded row of arguments whose lengths along dim are left open, and the words to fill.

    Positions of the lengths along dim, and of the amounts, tensor by tensor.
    """
    at, lengths, amounts = _FIXED, [], []
    for spec in args.tensors:
        amounts.append(at + 2)
        lengths.append(at + _SPEC + spec.dim)
        at += _SPEC + len(spec.shape)
    return tuple(args.encode()), tuple(lengths), tuple(amounts)


class Exchange(NamedTuple):
    """The rows of all ranks, and where the lengths and amounts stand in them."""

    call: Call
    rows: Tensor
    length_words: tuple[int, ...]
    amount_words: tuple[int, ...]

    def same(self, *free: int) -> bool:
        """Tell whether all rows are the same, except in these words."""
        different = self.rows != self.rows[self.call.rank]
        if free:
            different[:, list(free)] = False
        return not different.any()

    def lengths(self) -> tuple[tuple[int, ...], ...] | None:
        """What each rank holds along dim, tensor by tensor; None if rows differ in more than that."""
        return self._columns(self.length_words) if self.same(*self.length_words) else None

    def amounts(self) -> tuple[tuple[int, ...], ...] | None:
        """What each rank tells this one; None if rows differ in more than that and their lengths."""
        if not self.same(*self.length_words, *self.amount_words):
            return None
        return self._columns(self.amount_words)

    def _columns(self, words: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(self.rows[:, word].tolist()) for word in words)

    def decoded(self) -> list[RankArgs]:
        """Every rank's arguments; raises if some rank found a problem with its own."""
        ranks = [RankArgs.decode(row, rank) for rank, row in enumerate(self.rows.tolist())]
        problems = {rank: args.problem for rank, args in enumerate(ranks) if args.problem}
        if problems:
            raise _problem_error(ranks, problems, ranks[self.call.rank].problem)
        return ranks


def exchange(
    call: Call,
    mine: RankArgs,
    device: torch.device,
    amounts: Sequence[Sequence[int]] | None = None,
) -> Exchange:
    """Give every rank all ranks' rows.

    ``amounts[i][r]`` is a number about tensor ``i`` for rank ``r`` alone.
    """
    where = call.group.message_device(device)
    words, length_words, amount_words = _encoded(mine)
    row = torch.tensor(words, dtype=torch.int64)
    if amounts is None:
        rows = _gathered(call, row[:ROW], where)
    else:
        own = row.repeat(call.size, 1)
        for word, by_rank in zip(amount_words, amounts, strict=True):
            own[:, word] = torch.tensor(by_rank, dtype=torch.int64)
        rows = _exchanged(call, own[:, :ROW], where)
    if len(words) > ROW or int(rows[:, _LENGTH].max()) > ROW:
        longest = _checked_length(rows)
        if amounts is None:
            rest = _padded(row[ROW:], longest - ROW)
            rows = torch.cat([rows, _gathered(call, rest, where)], 1)
        else:
            rest = torch.stack([_padded(one[ROW:], longest - ROW) for one in own])
            rows = torch.cat([rows, _exchanged(call, rest, where)], 1)
    return Exchange(call, rows, length_words, amount_words)


def _encoded(mine: RankArgs) -> tuple[list[int], tuple[int, ...], tuple[int, ...]]:
    """The own words. All but the lengths along dim repeat from call to call and are cached."""
    if mine.problem is not None or any(spec.dtype is None for spec in mine.tensors):
        once, length_words, amount_words = _template.__wrapped__(mine)
        return list(once), length_words, amount_words
    open_specs = tuple(
        spec._replace(shape=(*spec.shape[: spec.dim], 0, *spec.shape[spec.dim + 1 :]))
        for spec in mine.tensors
    )
    found, length_words, amount_words = _template(replace(mine, tensors=open_specs))
    words = list(found)
    for word, spec in zip(length_words, mine.tensors, strict=True):
        words[word] = spec.shape[spec.dim]
    return words, length_words, amount_words


def _gathered(call: Call, row: Tensor, device: torch.device) -> Tensor:
    joined = wire.all_gather(call, row.to(device), (len(row),) * call.size)
    return joined.cpu().view(call.size, len(row))


def _exchanged(call: Call, rows: Tensor, device: torch.device) -> Tensor:
    counts = (rows.shape[1],) * call.size
    flat = wire.all_to_all(call, rows.reshape(-1).to(device), counts, counts, equal=True)
    return flat.cpu().view(rows.shape)


def _padded(words: Tensor, length: int) -> Tensor:
    return torch.cat([words, words.new_zeros(length - len(words))])


def _checked_length(rows: Tensor) -> int:
    """The length of the longest message, once every header is known to be good."""
    for rank, row in enumerate(rows.tolist()):
        reader = Reader(row, "handshake", rank)
        reader.choice(OPERATIONS)
        reader.number(_FIXED, _FIXED + _MOST_TENSORS * (_SPEC + MAX_DIMS))
    return max(ROW, int(rows[:, _LENGTH].max()))


def _problem_error(
    ranks: Sequence[RankArgs], problems: dict[int, InputError], own: InputError | None
) -> InputError:
    marks = {
        rank: str(problem).partition("\n")[0].removeprefix(f"{ranks[rank].operation}: ")
        for rank, problem in problems.items()
    }
    first = problems[min(problems)]
    rule, _, advice = str(first).partition("\n")
    kind = type(first if own is None else own)
    return kind(rank_table(rule, [str(args) for args in ranks], marks, advice))
