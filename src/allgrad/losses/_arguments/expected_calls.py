"""Which loss of a group comes next: a call like those before needs no message to compare arguments.

A loop over batches makes the same calls again and again. The rows in which the ranks compare their
arguments are kept, each by the rows of the call before it. A call that has followed twice in a row is
expected: its row travels with the first gather instead, of the sizes that are expected, too.

    rank 0   row as expected    [ keys | row ]               all as expected: the loss
    rank 1   row as expected    [ keys | row ]     --->
    rank 2   another row        [ zeros | zeros ]            one is not: the ranks compare anew

Every rank receives every row, so all ranks come to one decision, and expect the same of the next call.
"""

from __future__ import annotations

import weakref
from array import array
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

import torch

from allgrad.collectives.all_gather import all_gather

if TYPE_CHECKING:
    from allgrad._wire.groups import Group
    from allgrad.types import GroupLike

__all__ = ["Changed", "ExpectedCall", "History", "Payload", "as_expected", "history_of"]

EXPECTED_AFTER = 2  # times in a row that a call must have followed another
_MOST = 16


class Changed(Exception):
    """A rank's row is not the one that was expected."""


class Payload(NamedTuple):
    """The first gather of a loss: the elements of each rank, and what they are on this one."""

    sizes: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def with_row(self, words: int) -> tuple[int, ...]:
        more = words * 8 // self.dtype.itemsize
        return tuple(size + more for size in self.sizes)


@dataclass(slots=True)
class ExpectedCall:
    """A call that has followed another, how often in a row, and its first gather if it has one."""

    words: array[int]  # the rows of all ranks, joined
    counts: tuple[tuple[int, ...], ...]  # by rank
    digest: bytes  # of the words
    seen: int = 1
    payload: Payload | None = None

    def row(self, rank: int) -> array[int]:
        length = len(self.words) // len(self.counts)
        return self.words[rank * length : (rank + 1) * length]


@dataclass(slots=True)
class History:
    """The calls of one group; the same on all of its ranks.

    ``disagreements``: of the group, when it began. Then ranks may have made different calls.
    """

    disagreements: int = 0
    last: bytes = b""
    after: dict[bytes, ExpectedCall] = field(default_factory=dict)

    def expected(self) -> ExpectedCall | None:
        """The next call, if its message is known too."""
        found = self.after.get(self.last)
        return found if found and found.seen >= EXPECTED_AFTER and found.payload else None

    def came(self, call: ExpectedCall) -> None:
        """The call that was expected has been made."""
        call.seen += 1
        self.last = call.digest

    def add(self, rows: list[list[int]], counts: tuple[tuple[int, ...], ...]) -> ExpectedCall:
        words = array("q", (word for row in rows for word in row))
        digest = blake2b(words.tobytes()).digest()
        found = self.after.get(self.last)
        if found is None or found.digest != digest:
            if len(self.after) >= _MOST:
                self.after.clear()
            found = self.after[self.last] = ExpectedCall(words, counts, digest, seen=0)
        self.came(found)
        return found

    def forget(self) -> None:
        """After a failure that other ranks may not have seen."""
        self.last = b""
        self.after.clear()


_HISTORIES: weakref.WeakKeyDictionary[Group, History] = weakref.WeakKeyDictionary()


def history_of(group: Group) -> History:
    found = _HISTORIES.get(group)
    if found is None or found.disagreements != group.disagreements:
        found = _HISTORIES[group] = History(group.disagreements)
    return found


def as_expected(
    history: History, words: list[int], rank: int, group: GroupLike, *, expects: bool = True
) -> ExpectedCall | None:
    """The call that is expected next, if this rank's row is that of it.

    If another call is expected, or this one cannot travel with its first gather (``expects``), this rank
    takes part in the gather that the others expect, with a row of zeros, so that they learn of it.
    """
    expected = history.expected()
    if expected is None:
        return None
    row = expected.row(rank)
    if expects and words == row.tolist():
        return expected
    assert expected.payload is not None
    sizes = expected.payload.with_row(len(row))
    nothing = torch.zeros(sizes[rank], dtype=expected.payload.dtype, device=expected.payload.device)
    all_gather(nothing, sizes=sizes, group=group, grad="none")
    return None
