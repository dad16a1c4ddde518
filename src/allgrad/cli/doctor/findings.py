"""A finding: what was looked at, what is there, and if that is not well, what it means and what to do."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Finding", "Status", "ok", "problem", "warning", "worst"]


class Status(Enum):
    """How a finding is to be taken; only a problem fails the command."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    about: str
    status: Status
    found: str
    meaning: str = ""
    advice: str = ""

    def as_json(self) -> dict[str, Any]:
        """The fields, as JSON has them."""
        return {**asdict(self), "status": self.status.value}


def ok(about: str, found: str) -> Finding:
    """All is well."""
    return Finding(about, Status.OK, found)


def warning(about: str, found: str, meaning: str, advice: str) -> Finding:
    """It works, but slowly, or not for long."""
    return Finding(about, Status.WARNING, found, meaning, advice)


def problem(about: str, found: str, meaning: str, advice: str) -> Finding:
    """A job cannot run like this, or gives wrong results."""
    return Finding(about, Status.PROBLEM, found, meaning, advice)


def worst(findings: Sequence[Finding]) -> Status:
    """The status of the whole report."""
    order = list(Status)
    return max((finding.status for finding in findings), key=order.index, default=Status.OK)
