"""Texts that ranks compare: by their hashes first, in full only where they differ.

    rank 0   "abc"         hash 1                    "abc"  "abc"  "xyz"
    rank 1   "abc"   --->  hash 1   --- differ --->  "abc"  "abc"  "xyz"
    rank 2   "xyz"         hash 2                    "abc"  "abc"  "xyz"

When all is well one message of 40 bytes a rank has travelled. Otherwise one rank for each text
sends it. Texts are UTF-8; nothing received is ever unpickled or evaluated.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, NoReturn

import torch

from allgrad._wire import primitives as wire
from allgrad.collectives.all_gather import all_gather, gather_sizes
from allgrad.errors import AllgradError, GroupError, InputError, TensorError, rank_table
from allgrad.module_state._entries import tensors_and_others

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from allgrad._wire.primitives import GroupLike
    from allgrad.module_state._entries import Entry

__all__ = ["Line", "open_line"]

_VERSION = 1
_ROW = struct.Struct("<HHxxxx32s")  # version, 0 or the number of a problem's class, hash
_PROBLEMS: tuple[type[InputError], ...] = (InputError, TensorError, GroupError)


@dataclass(frozen=True, slots=True)
class Line:
    """The way to the other ranks: what the caller gave as group, who that is, where messages live."""

    op: str
    group: GroupLike
    ranks: wire.Call
    device: torch.device

    def compare(
        self, outline: str, text: Callable[[], str], problem: InputError | None = None
    ) -> list[str] | None:
        """Give ``None`` when every rank has this outline, else the text of each rank.

        A rank with a problem says so instead: then every rank raises, with a table.
        """
        if self.ranks.size == 1:
            if problem is not None:
                raise problem
            return None
        number = 0 if problem is None else 1 + _number(problem)
        hashed = outline if problem is None else str(problem)
        digest = blake2b(hashed.encode(errors="replace"), digest_size=32).digest()
        mine = _ROW.pack(_VERSION, number, digest)
        heard = self._gather(mine, [_ROW.size] * self.ranks.size)
        if len(set(heard)) == 1 and problem is None:
            return None
        numbers = [_read(row) for row in heard]
        speakers = {row: rank for rank, row in reversed(list(enumerate(heard)))}
        said = ""
        if speakers[mine] == self.ranks.rank:
            said = text() if problem is None else str(problem)
        spoken = self._gather(said.encode(errors="replace"))
        texts = [spoken[speakers[row]].decode(errors="replace") for row in heard]
        if any(numbers):
            self._raise(problem, numbers, texts)
        return texts

    def from_rank(self, src: int, text: str) -> str:
        """Give every rank the text of ``src``."""
        said = text.encode() if self.ranks.rank == src else b""
        return self._gather(said)[src].decode(errors="replace")

    def _gather(self, data: bytes, lengths: Sequence[int] | None = None) -> list[bytes]:
        mine = torch.empty(0, dtype=torch.uint8)
        if data:
            mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        mine = mine.to(self.device)
        lengths = lengths or gather_sizes(mine, group=self.group)
        joined = all_gather(mine, sizes=lengths, group=self.group)
        return [bytes(part.numpy()) for part in joined.cpu().split(list(lengths))]

    def _raise(
        self, mine: InputError | None, numbers: Sequence[int], texts: Sequence[str]
    ) -> NoReturn:
        heads = [text.partition("\n") for text in texts]
        marks = {
            rank: heads[rank][0].removeprefix(f"{self.op}: ")
            for rank, number in enumerate(numbers)
            if number
        }
        first = min(marks)
        rows = ["not ready" if number else "ready" for number in numbers]
        kind = _PROBLEMS[numbers[first] - 1] if mine is None else type(mine)
        raise kind(rank_table(heads[first][0], rows, marks, heads[first][2]))


def open_line(op: str, group: GroupLike, held: Sequence[Entry]) -> Line:
    """Find the group's ranks, and a device on which it carries messages."""
    ranks = wire.resolve(op, group)
    device = torch.device("cpu")
    if torch.accelerator.is_available():
        used = {entry.value.device for entry in tensors_and_others(held)[0]}
        away = sorted(str(device) for device in used if device.type not in {"cpu", "meta"})
        device = (
            torch.device(away[0]) if away else torch.accelerator.current_accelerator() or device
        )
    return Line(op, group, ranks, ranks.group.message_device(device))


def _read(row: bytes) -> int:
    """The number of a problem's class, checked."""
    version, number, _ = _ROW.unpack(row)
    if version != _VERSION or number > len(_PROBLEMS):
        raise AllgradError(
            "A message about another rank's state is garbled: a number is out of range.\n"
            "Run the same allgrad on every rank, and the same calls in the same order."
        )
    return int(number)


def _number(problem: InputError) -> int:
    return _PROBLEMS.index(type(problem)) if type(problem) in _PROBLEMS else 0
