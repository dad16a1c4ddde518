"""Where the ranks' states differ, and the message that shows it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from allgrad.errors import AllgradError, rank_table
from allgrad.module_state._specs import Facts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Difference", "StateMismatch", "differences", "mismatch", "read", "write"]

_MISSING = "missing"
_MOST_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Difference:
    """A name under which the ranks hold different things.

    ``what`` is the first thing that differs: ``"name"`` (some ranks lack it), ``"kind"``,
    ``"dtype"``, ``"shape"``, ``"piece"`` (of a DTensor), ``"tied"``, ``"device"`` or ``"value"``.
    ``by_rank`` says what each rank has, ``odd`` which ranks differ from most of them.
    """

    name: str
    what: str
    by_rank: tuple[str, ...]
    odd: tuple[int, ...]

    def __str__(self) -> str:
        mark = "" if self.what == "name" else f"another {self.what}"
        if self.what == "tied":
            mark = "tied in another way"
        marks = {
            rank: mark or ("missing here" if self.by_rank[rank] == _MISSING else "only here")
            for rank in self.odd
        }
        return rank_table(self.name, self.by_rank, marks, "").rstrip()


class StateMismatch(AllgradError, RuntimeError):
    """The ranks hold different states; ``differences`` says where."""

    def __init__(self, message: str, differences: Sequence[Difference] = ()) -> None:
        super().__init__(message)
        self.differences = tuple(differences)


def mismatch(rule: str, found: Sequence[Difference], advice: str) -> StateMismatch:
    """Compose the error: the rule, a table for each of the first names, what to do."""
    lines = [f"{rule}; {len(found)} differ{'s' if len(found) == 1 else ''}:"]
    lines += [str(difference) for difference in found[:_MOST_SHOWN]]
    if len(found) > _MOST_SHOWN:
        lines.append(f"... and {len(found) - _MOST_SHOWN} more: see the error's differences.")
    return StateMismatch("\n".join([*lines, advice]), found)


def write(held: Mapping[str, Facts]) -> str:
    """Facts by name, as text: one flat list, a name and what is said of it, again and again."""
    return json.dumps([word for name, said in held.items() for word in (name, *said)])


def read(text: str) -> dict[str, Facts]:
    """The facts in a text from another rank, each checked before it is used."""
    try:
        words = json.loads(text)
    except (ValueError, RecursionError):
        words = None
    width = 1 + len(Facts._fields)
    good = isinstance(words, list) and len(words) % width == 0
    if not good or not all(isinstance(word, str) for word in words):
        raise AllgradError(
            "A description of another rank's state is garbled.\n"
            "Run the same allgrad on every rank, and the same calls in the same order."
        )
    return {
        words[start]: Facts(*words[start + 1 : start + width])
        for start in range(0, len(words), width)
    }


def differences(by_rank: Sequence[Mapping[str, Facts]]) -> list[Difference]:
    """Compare what the ranks said, name by name, in the order in which they said it."""
    names = dict.fromkeys(name for held in by_rank for name in held)
    found = []
    for name in names:
        said = [held.get(name) for held in by_rank]
        if any(one != said[0] for one in said):
            usual = max(said, key=said.count)
            odd = tuple(rank for rank, one in enumerate(said) if one != usual)
            words = tuple(_MISSING if one is None else str(one) for one in said)
            found.append(Difference(name, _first_difference(said), words, odd))
    return found


def _first_difference(said: Sequence[Facts | None]) -> str:
    present = [one for one in said if one is not None]
    if len(present) < len(said):
        return "name"
    return next(
        field
        for field, words in zip(Facts._fields, zip(*present, strict=True), strict=True)
        if len(set(words)) > 1
    )
