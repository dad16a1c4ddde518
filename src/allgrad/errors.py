"""Error classes, and messages that show every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "AllgradError",
    "CollectiveMismatch",
    "GroupError",
    "InputError",
    "ModeError",
    "PieceMismatch",
    "RankLate",
    "RankLost",
    "RankRaised",
    "ReductionError",
    "SizesError",
    "TensorError",
    "in_words",
    "rank_table",
]


class AllgradError(Exception):
    """Everything allgrad raises on purpose."""


class InputError(AllgradError, ValueError):
    """An argument that the call cannot take."""


class ModeError(AllgradError, NotImplementedError):
    """A way of differentiating or compiling in which the call would not be exact."""


class TensorError(InputError):
    """Not a tensor, or a kind of tensor that cannot travel."""


class PieceMismatch(InputError):
    """The ranks' pieces do not fit together."""


class SizesError(InputError):
    """Sizes by rank that do not fit the tensor, the group, or each other."""


class ReductionError(InputError):
    """A reduction that does not exist, or not for this dtype."""


class GroupError(InputError):
    """A rank outside the group, or a group that is none."""


class CollectiveMismatch(AllgradError):
    """The ranks were about to do different things."""


class RankLate(AllgradError):
    """A rank did not come in time."""


class RankLost(AllgradError):
    """A rank's connection is gone."""


class RankRaised(AllgradError):
    """Another rank ended with an error of its own."""


def in_words(error: BaseException) -> str:
    """Type and message of an error, as other ranks and recordings get them."""
    message = str(error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def rank_table(
    rule: str, rows: Sequence[str], marks: Mapping[int, str], advice: str, *, most: int = 32
) -> str:
    """Compose a message: the rule, what every rank had with the odd ones marked, what to do.

    A large world shows the marked ranks and the first others, ``most`` lines in all.
    """
    shown = sorted(sorted(range(len(rows)), key=lambda rank: (rank not in marks, rank))[:most])
    width = max((len(rows[rank]) for rank in shown), default=0)
    digits = len(str(max(len(rows) - 1, 0)))
    lines = [rule]
    for rank in shown:
        mark = f"   <- {marks[rank]}" if rank in marks else ""
        lines.append(f"  rank {rank:>{digits}}: {rows[rank]:<{width if mark else 0}}{mark}")
    if len(shown) < len(rows):
        lines.append(f"  ... and {len(rows) - len(shown)} more ranks")
    lines.append(advice)
    return "\n".join(lines)
