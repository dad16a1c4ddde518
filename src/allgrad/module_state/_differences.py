"""Where the states of the ranks differ, and the error message that shows it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from allgrad.errors import AllgradError, rank_table
from allgrad.module_state._specs import EntrySpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Difference", "StateMismatch", "differences", "mismatch"]

_MISSING = "missing"
_MOST_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Difference:
    """A name under which the ranks do not all hold the same.

    ``what`` is the first difference: ``"name"`` (missing on some ranks), ``"kind"``, ``"dtype"``,
    ``"shape"``, ``"piece"`` (of a DTensor), ``"tied"``, ``"device"`` or ``"value"``.
    ``by_rank`` tells what each rank has, ``odd`` which ranks differ from the majority.
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
    """The ranks hold different states; ``differences`` tells where."""

    def __init__(self, message: str, differences: Sequence[Difference] = ()) -> None:
        super().__init__(message)
        self.differences = tuple(differences)


def mismatch(rule: str, found: Sequence[Difference], advice: str) -> StateMismatch:
    """The error: the rule, a table for each of the first names, what to do."""
    lines = [f"{rule}; {len(found)} differ{'s' if len(found) == 1 else ''}:"]
    lines += [str(difference) for difference in found[:_MOST_SHOWN]]
    if len(found) > _MOST_SHOWN:
        lines.append(f"... and {len(found) - _MOST_SHOWN} more: see the error's differences.")
    return StateMismatch("\n".join([*lines, advice]), found)


def differences(by_rank: Sequence[Mapping[str, EntrySpec]]) -> list[Difference]:
    """Compare the specs of the ranks, name by name, in their order."""
    names = dict.fromkeys(name for specs in by_rank for name in specs)
    found = []
    for name in names:
        held = [specs.get(name) for specs in by_rank]
        counts = Counter(held)
        if len(counts) > 1:
            most_common = counts.most_common(1)[0][0]
            odd = tuple(rank for rank, spec in enumerate(held) if spec != most_common)
            texts = tuple(_MISSING if spec is None else str(spec) for spec in held)
            found.append(Difference(name, _first_difference(list(counts)), texts, odd))
    return found


def _first_difference(specs: Sequence[EntrySpec | None]) -> str:
    present = [spec for spec in specs if spec is not None]
    if len(present) < len(specs):
        return "name"
    return next(
        field
        for field, values in zip(EntrySpec._fields, zip(*present, strict=True), strict=True)
        if len(set(values)) > 1
    )
