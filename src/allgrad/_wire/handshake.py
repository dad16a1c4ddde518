"""What the ranks tell each other before a call whose sizes they do not know: one row each.

Behind the codec's header a row of 96 words has

    word  2        the operation
          3        words of the whole message
          4        tensors of the call
          5        hash of their names in the nest
          6        src or dst, + 1
          7        0, or the class of the error that this rank found in its own arguments
          8        how many amounts there are, or -1 if they follow in a message of their own
          9        device type of the tensors, which only scatter asks for
         10 -      for each tensor: dtype, dim, number of dimensions, shape
                   amounts for each receiver, tensor by tensor (all_to_all, scatter)
                   the text of the error

A nest of many tensors may need more words than a row has: the rest follows in a second message,
whose length all ranks then know. Amounts that do not fit into the row follow too. The first message
is the same for every operation, so that ranks that call different ones find out.

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
_LENGTH, _AMOUNTS = 3, 8  # the words with the length of the message, and the number of amounts
_TENSORS, _NAMES, _ROOT, _ERROR, _DEVICE = 4, 5, 6, 7, 9
_FIXED = 10
_SPEC = 3  # words of a tensor before its shape
_FOLLOW = -1  # amounts come in a message of their own
_MOST_TENSORS = 1 << 20
_FEW_RANKS = 16

OPERATIONS = (
    *("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter", "permute"),
    *("gather_sizes", "shift", "all_reduce", "broadcast", "reduce", "scan"),
)
_DEVICES = ("", "cpu", "cuda", "xpu", "hpu", "mps", "npu", "privateuseone")
_ERRORS: tuple[type[InputError] | None, ...] = (
    *(None, InputError, TensorError, PieceMismatch),
    *(SizesError, ReductionError, GroupError),
)


class TensorSpec(NamedTuple):
    """One tensor of a call."""

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    dim: int

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
    amounts: tuple[int, ...] | None = ()  # for each receiver, tensor by tensor; None: they follow
    device: str = ""  # type of the tensors' device; empty if it is none of the usual ones

    def encode(self) -> list[int]:
        """The row, and whatever about the tensors does not fit into it."""
        writer = Writer("handshake")
        writer.choice(self.operation, OPERATIONS)
        length = _FIXED + sum(_SPEC + len(spec.shape) for spec in self.tensors)
        kind = type(self.problem) if type(self.problem) in _ERRORS else InputError
        error = 0 if self.problem is None else _ERRORS.index(kind)
        amounts = self.amounts or ()
        writer.number(length, len(self.tensors), self.names, self.root + 1, error)
        writer.number(_FOLLOW if self.amounts is None else len(amounts))
        writer.choice(self.device if self.device in _DEVICES else "", _DEVICES)
        for spec in self.tensors:
            writer.dtype(spec.dtype)
            writer.number(spec.dim, len(spec.shape), *spec.shape)
        writer.number(*amounts)
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
        count_of_amounts, device = reader.number(_FOLLOW, ROW), reader.choice(_DEVICES)
        specs = []
        for _ in range(count):
            dtype, dim = reader.dtype(), reader.number(0, MAX_DIMS)
            specs.append(TensorSpec(dtype, reader.shape(), dim))
            if dim >= max(1, len(specs[-1].shape)):
                raise reader.damaged()
        amounts = None if count_of_amounts == _FOLLOW else reader.numbers(count_of_amounts)
        problem = None if error is None else error(reader.text(ROW * 8))
        return RankArgs(operation, tuple(specs), names, root, problem, amounts, device)

    def __str__(self) -> str:
        return ", ".join(str(spec) for spec in self.tensors[:3]) or "no tensor"


def hash_names(names: Sequence[str]) -> int:
    """A number that differs when the names of a nest's tensors do."""
    digest = hashlib.blake2b("\n".join(names).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


@lru_cache(maxsize=1024)
def _template(args: RankArgs) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The encoded row of arguments, and the words with the tensors' lengths along dim."""
    at, lengths = _FIXED, []
    for spec in args.tensors:
        lengths.append(at + _SPEC + spec.dim)
        at += _SPEC + len(spec.shape)
    return tuple(args.encode()), tuple(lengths)


@lru_cache(maxsize=256)
def _decoded(row: tuple[int, ...], sender: int) -> RankArgs:
    """A row without an error, which repeats from call to call."""
    return RankArgs.decode(row, sender)


class Exchange(NamedTuple):
    """The rows of all ranks, and where the lengths and the amounts for this rank stand in them."""

    call: Call
    rows: Tensor
    length_words: tuple[int, ...]
    first_amount: int
    own_amounts: Sequence[Sequence[int]] | None  # of this rank, by tensor and receiver
    device: torch.device
    listed: list[list[int]] | None  # the rows again, where the ranks are few

    def same(self, *free: int) -> bool:
        """Tell whether all rows are the same, except in these words and in the device.

        Behind the amounts there are zeros, or the text of an error that its own word tells of.
        """
        if self.listed is not None:
            return _all_same(self.listed, self.listed[self.call.rank], (_DEVICE, *free))
        own = self.rows[self.call.rank]
        used = int(own[_LENGTH]) + max(0, int(own[_AMOUNTS]))
        different = self.rows[:, :used] != own[:used]
        different[:, [_DEVICE, *free]] = False
        return not different.any()

    def told_by(self, src: int) -> RankArgs | None:
        """The arguments of ``src``; None unless all ranks are in this call with this root, none has
        a problem, and all have its nest, if it has one. Only its row is decoded.
        """
        words = [0, 1, 2, _ROOT, _ERROR]
        if self.listed is not None:
            row, own = self.listed[src], self.listed[self.call.rank]
            if row[_NAMES]:
                words += [_TENSORS, _NAMES]
            same = all(told[word] == own[word] for told in self.listed for word in words)
            return _decoded(tuple(row), src) if same and not row[_ERROR] else None
        if int(self.rows[src, _NAMES]):
            words += [_TENSORS, _NAMES]
        rows = self.rows[:, words]
        if int(rows[src, 4]) or bool((rows != rows[self.call.rank]).any()):
            return None
        return RankArgs.decode(self.rows[src].tolist(), src)

    def lengths(self) -> tuple[tuple[int, ...], ...] | None:
        """What each rank holds along dim, tensor by tensor; None if rows differ in more than that."""
        if not self.same(*self.length_words):
            return None
        return self._words(self.length_words)

    def amounts(self) -> tuple[tuple[int, ...], ...] | None:
        """What each rank tells this one; None if rows differ in more than that and their lengths."""
        assert self.own_amounts is not None
        inline = int(self.rows[self.call.rank, _AMOUNTS])
        words = range(self.first_amount, self.first_amount + max(inline, 0))
        if not self.same(*self.length_words, *words):
            return None
        if inline != _FOLLOW:
            return self._words(words[self.call.rank :: self.call.size])
        return self.following_amounts(len(self.own_amounts))

    def _words(self, words: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """These words of every rank's row."""
        if self.listed is not None:
            return tuple(tuple([row[word] for row in self.listed]) for word in words)
        return tuple(tuple(self.rows[:, word].tolist()) for word in words)

    def following_amounts(self, tensors: int) -> tuple[tuple[int, ...], ...]:
        """Amounts for so many tensors in a message of their own, by tensor and sender."""
        own = torch.zeros(tensors, self.call.size, dtype=torch.int64, device="cpu")
        if self.own_amounts is not None and len(self.own_amounts) == tensors:
            own = torch.tensor(self.own_amounts, dtype=torch.int64, device="cpu")
        counts = (tensors,) * self.call.size
        sent = own.t().reshape(-1).to(self.device)
        found = wire.all_to_all(self.call, sent, counts, counts, equal=True)
        by_tensor: list[list[int]] = found.cpu().view(self.call.size, tensors).t().tolist()
        return tuple(tuple(one) for one in by_tensor)

    def decoded(self) -> list[RankArgs]:
        """Every rank's arguments; raises if some rank found a problem with its own."""
        ranks = [RankArgs.decode(row, rank) for rank, row in enumerate(self.rows.tolist())]
        problems = {rank: args.problem for rank, args in enumerate(ranks) if args.problem}
        if problems:
            raise _problem_error(ranks, problems, ranks[self.call.rank].problem)
        return ranks


def _all_same(rows: Sequence[list[int]], own: list[int], free: Sequence[int]) -> bool:
    used = own[_LENGTH] + max(0, own[_AMOUNTS])
    expected = own[:used]
    for row in rows:
        told = row[:used]
        if told != expected:
            for word in free:
                told[word] = expected[word]
            if told != expected:
                return False
    return True


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
    specs = sum(_SPEC + len(spec.shape) for spec in mine.tensors)
    if amounts is not None:
        fit = _FIXED + specs + len(amounts) * call.size <= ROW
        flat = tuple([n for by_rank in amounts for n in by_rank]) if fit else None
        mine = replace(mine, amounts=flat)
    words, length_words = _encoded(mine)
    row = torch.tensor(words, dtype=torch.int64, device="cpu")
    rows = _gathered(call, row if len(words) == ROW else row[:ROW], where)
    # Steps of torch cost more than those of Python, until there are many rows.
    listed = rows.tolist() if call.size <= _FEW_RANKS else None
    longest = (
        int(rows[:, _LENGTH].max()) if listed is None else max([told[_LENGTH] for told in listed])
    )
    if len(words) > ROW or longest > ROW:
        longest = _checked_length(rows)
        rest = torch.cat([row[ROW:], row.new_zeros(longest - len(words))])
        rows = torch.cat([rows, _gathered(call, rest, where)], 1)
        listed = None
    return Exchange(call, rows, length_words, _FIXED + specs, amounts, where, listed)


def _encoded(mine: RankArgs) -> tuple[list[int], tuple[int, ...]]:
    """The own words. All but lengths along dim and amounts repeat from call to call and are cached."""
    if mine.problem is not None or any(not spec.shape for spec in mine.tensors):
        return mine.encode(), ()
    open_specs = tuple(
        spec._replace(shape=(*spec.shape[: spec.dim], 0, *spec.shape[spec.dim + 1 :]))
        for spec in mine.tensors
    )
    own_amounts = mine.amounts or ()
    no_amounts = None if mine.amounts is None else (0,) * len(own_amounts)
    found, length_words = _template(replace(mine, tensors=open_specs, amounts=no_amounts))
    words = list(found)
    for word, spec in zip(length_words, mine.tensors, strict=True):
        words[word] = spec.shape[spec.dim]
    if own_amounts:
        first = int(found[_LENGTH])
        words[first : first + len(own_amounts)] = own_amounts
    return words, length_words


def _gathered(call: Call, row: Tensor, device: torch.device) -> Tensor:
    length = row.shape[0]
    joined = wire.all_gather(call, row.to(device), (length,) * call.size)
    return joined.cpu().view(call.size, length)


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
