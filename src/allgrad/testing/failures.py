"""How a rank failed, and the errors that show every rank."""

from __future__ import annotations

import contextlib
import re
import textwrap
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from allgrad.errors import AllgradError
from allgrad.testing.serialization import CannotShip, deserialize, serialize

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

__all__ = ["RankError", "RankFailed", "RanksStuck", "rank_code"]

_HERE = str(Path(__file__).parent)
_WORKER = str(Path(__file__).with_name("worker.py"))
_SOURCE_LOCATION = re.compile(r"\[/\S+:\d+\] ")  # source location in the backend's C++
_PEER_LOST = re.compile(r"connection|broken pipe|socket|peer", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class RankError:
    """How one rank ended.

    ``raised``: its code raised ``exception``. ``died``: the process ended by itself. ``stuck``: it
    was killed while it still ran. ``details`` is the traceback, or the stack where it was last seen.
    """

    rank: int
    how: Literal["raised", "died", "stuck"]
    summary: str
    details: str
    when: float
    pickled: bytes | None = None

    @classmethod
    def of(cls, rank: int, error: BaseException, when: float) -> RankError:
        """Describe what the code of ``rank`` raised, in a form that can be sent."""
        pickled = None
        with contextlib.suppress(CannotShip):
            pickled = serialize(error, "the exception")
        error.__traceback__ = _own_frames(error.__traceback__)
        last = "".join(traceback.format_exception_only(error)).strip()
        text = "".join(traceback.format_exception(error)).rstrip()
        return cls(rank, "raised", last, text, when, pickled)

    @property
    def exception(self) -> BaseException | None:
        """The exception itself, if it could be pickled."""
        if self.pickled is None:
            return None
        try:
            error = deserialize(self.pickled, "the exception")
        except CannotShip:
            return None
        return error if isinstance(error, BaseException) else None

    @property
    def lost_a_peer(self) -> bool:
        """Whether this looks like the consequence of another rank's failure."""
        # The type of torch's error depends on the backend; the words of its message do not.
        return self.how == "stuck" or (
            self.how == "raised"
            and self.summary.startswith(("RuntimeError", "torch.distributed"))
            and _PEER_LOST.search(self.summary) is not None
        )

    @property
    def one_line(self) -> str:
        """The failure in one line, for a report that shows another rank in full."""
        first = textwrap.shorten(_SOURCE_LOCATION.sub("", self.summary), 120, placeholder=" ...")
        if self.how == "stuck":
            return f"rank {self.rank}: did not stop, killed"
        released = self.how == "raised" and self.lost_a_peer
        return f"rank {self.rank}: " + (f"released ({first})" if released else first)


class RankFailed(AllgradError):
    """A rank raised or died. The first failure is shown in full; ``failures`` has all, by rank."""

    def __init__(self, world: int, failures: Mapping[int, RankError]) -> None:
        self.world = world
        self.failures = dict(failures)
        self.root = min(failures.values(), key=lambda error: (error.lost_a_peer, error.when))
        super().__init__(self._message())

    def __reduce__(self) -> tuple[type[RankFailed], tuple[int, dict[int, RankError]]]:
        return type(self), (self.world, self.failures)

    @property
    def headline(self) -> str:
        """The failure in one line."""
        first = textwrap.shorten(self.root.summary, 120, placeholder=" ...")
        return f"rank {self.root.rank} of {self.world}: {first}"

    def _message(self) -> str:
        root = self.root
        lines = [f"rank {root.rank} of {self.world} failed:"]
        if root.how != "raised":
            lines.append(root.summary)
        lines.append(root.details)
        for rank in range(self.world):
            if rank in self.failures and rank != root.rank:
                lines.append(self.failures[rank].one_line)
            elif rank not in self.failures:
                lines.append(f"rank {rank}: finished")
        return "\n".join(line for line in lines if line)


class RanksStuck(AllgradError):
    """Ranks were still running at the time limit; the message shows where."""

    def __init__(self, world: int, limit: float, failures: Mapping[int, RankError]) -> None:
        self.world = world
        self.limit = limit
        self.failures = dict(failures)
        super().__init__(self._message())

    def __reduce__(self) -> tuple[type[RanksStuck], tuple[int, float, dict[int, RankError]]]:
        return type(self), (self.world, self.limit, self.failures)

    @property
    def headline(self) -> str:
        """The failure in one line."""
        return f"{len(self.failures)} of {self.world} ranks did not finish within {self.limit:g} s"

    def _message(self) -> str:
        lines = [f"{self.headline}:"]
        for rank in range(self.world):
            if rank in self.failures:
                lines.append(f"rank {rank}: stuck at (most recent call first)")
                lines.append(textwrap.indent(self.failures[rank].details, "  "))
            else:
                lines.append(f"rank {rank}: finished")
        return "\n".join(lines)


def _own_frames(frames: TracebackType | None) -> TracebackType | None:
    """Drop the leading frames that belong to the runner."""
    while (
        frames is not None
        and frames.tb_next is not None
        and frames.tb_frame.f_code.co_filename.startswith(_HERE)
    ):
        frames = frames.tb_next
    return frames


def rank_code(stacks: str) -> str:
    """From the stacks of all threads, keep the frames of the rank's own code."""
    for thread in stacks.split("\n\n"):
        own, below, _ = thread.partition(f'File "{_WORKER}"')
        if below and own.strip().count("\n"):
            frames = [line.strip() for line in own.splitlines()[1:] if line.strip()]
            while frames and frames[-1].startswith(f'File "{_HERE}'):
                frames.pop()
            return "\n".join(frames)
    return ""
