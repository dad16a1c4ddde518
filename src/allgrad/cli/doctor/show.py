"""The report as text, and as JSON."""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING

import typer

from allgrad._core.version import __version__
from allgrad.cli.doctor.findings import Status

if TYPE_CHECKING:
    from collections.abc import Iterator

    from allgrad.cli.doctor.examination import Report

__all__ = ["as_json", "as_text"]

_COLOURS = {Status.OK: "green", Status.WARNING: "yellow", Status.PROBLEM: "red"}
_WIDTH = 100


def as_text(report: Report) -> str:
    """One line for each finding; below it what it means and what to do, unless it is ok."""
    hosts = len({own.host for own in report.facts.values()})
    about = f"{report.size} rank{'s' * (report.size != 1)}"
    about += f" on {hosts} host{'s' * (hosts != 1)}" if len(report.facts) == report.size else ""
    lines = [f"allgrad doctor: {about}, started by {report.started_by}", ""]
    column = max(len(finding.about) for finding in report.findings) + 2
    for finding in report.findings:
        status = f"{finding.status.value:<9}"
        head, *more = _wrapped(finding.found, 9 + column)
        lines.append(
            typer.style(status, fg=_COLOURS[finding.status]) + f"{finding.about:<{column}}" + head
        )
        lines += more
        for text in (finding.meaning, finding.advice):
            lines += [" " * (9 + column) + line.lstrip() for line in _wrapped(text, 9 + column)]
    return "\n".join([*lines, "", _summary(report)])


def _wrapped(text: str, indent: int) -> list[str]:
    """Lines of a text, all but the first indented."""
    lines = [part for line in text.splitlines() for part in textwrap.wrap(line, _WIDTH - indent)]
    return [line if i == 0 else " " * indent + line for i, line in enumerate(lines)]


def _summary(report: Report) -> str:
    counted = list(_counts(report))
    return f"{', '.join(counted)}." if counted else "All is well."


def _counts(report: Report) -> Iterator[str]:
    for status in (Status.PROBLEM, Status.WARNING):
        number = sum(finding.status is status for finding in report.findings)
        if number:
            yield f"{number} {status.value}{'s' * (number != 1)}"


def as_json(report: Report) -> str:
    """Everything, for scripts and for an issue."""
    return json.dumps(
        {
            "allgrad": __version__,
            "status": report.status.value,
            "started_by": report.started_by,
            "size": report.size,
            "findings": [finding.as_json() for finding in report.findings],
            "ranks": {str(rank): own.as_json() for rank, own in sorted(report.facts.items())},
        },
        indent=1,
    )
