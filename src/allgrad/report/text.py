"""Findings on a terminal."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from rich.console import Group
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from allgrad.report.units import nbytes, seconds, short_site

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType, RenderResult

    from allgrad.report.model import Findings, Line, Mismatch

__all__ = ["plan_says", "summary", "text"]

_LINES = 12
_UNLIMITED = 10_000  # columns


def text(found: Findings) -> RenderableType:
    """Everything, the most important first."""
    parts: list[RenderableType] = [Text(summary(found))]
    for level, sentence in found.headlines:
        parts.append(Text(f"  {sentence}", "bold red" if level == "bad" else "yellow"))
    parts += [_mismatch(one) for one in found.mismatches]
    if found.hangs or any(one.error for one in found.last_calls):
        parts.append(_Fitting(partial(_last_calls, found)))
    parts.append(_ranks(found))
    parts += [_Fitting(partial(make, found)) for make in (_lines, _slowest)]
    return Group(*parts)


def summary(found: Findings) -> str:
    """One line about the whole recording."""
    recording = found.recording
    calls = f"{recording.total:,} calls of {len(recording.ranks)} ranks"
    return f"{calls} in {seconds(found.ended - found.began)}. {recording.clocks}"


def _add_row(table: Table, *cells: str | Text) -> None:
    """Cells as they are: names of files and groups may look like markup of rich."""
    table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))


class _Fitting:
    """A table with names of calls, which stay whole: where it is too wide, "backward" stands below them."""

    def __init__(self, make: Callable[[str], Table]) -> None:
        self._make = make

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = self._make(" ")
        needed = Measurement.get(console, options.update_width(_UNLIMITED), wide).maximum
        yield wide if needed <= options.max_width else self._make("\n")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=Text(f"\n{title}", "bold"), box=None, pad_edge=False, header_style="dim")
    table.collapse_padding = True
    table.title_justify = "left"
    for column in columns:
        right = column.startswith(">")
        name = column.removeprefix(">")
        # On a narrow terminal every cell is broken into lines; none is cut.
        justify: JustifyMethod = "right" if right else "left"
        table.add_column(name, justify=justify, overflow="fold", no_wrap=name == "call")
    return table


def _ranks(found: Findings) -> Table:
    columns = ("rank", "host", ">calls", ">in calls", ">waits", ">last", ">late by", ">others wait")
    table = _table("Ranks: who waits, and who is waited for", *columns)
    for one in found.ranks:
        share = one.waiting / one.in_calls if one.in_calls else 0.0
        last = one.last / one.matched if one.matched else 0.0
        _add_row(
            table,
            str(one.rank),
            one.host,
            f"{one.calls:,}",
            seconds(one.in_calls),
            f"{share:.0%}",
            f"{last:.0%}",
            seconds(one.lateness) if one.late else "",
            seconds(one.caused),
        )
    return table


def _lines(found: Findings, space: str) -> Table:
    columns = (
        "call",
        "line",
        ">calls",
        ">bytes",
        ">time",
        ">waits",
        "algorithm",
        ">a call",
        ">plan",
    )
    title = "Lines of the program, by time in calls of all ranks; a call: one, without waiting"
    table = _table(title, *columns, ">skew")
    for line in found.lines[:_LINES]:
        share = line.waiting / line.in_calls if line.in_calls else 0.0
        _add_row(
            table,
            line.name + (f"{space}backward" if line.backward else ""),
            short_site(line.site),
            f"{line.calls:,}",
            nbytes(line.nbytes),
            seconds(line.in_calls),
            f"{share:.0%}",
            ", ".join(sorted(line.algorithms, key=lambda name: -line.algorithms[name])),
            seconds(line.moving),
            plan_says(line),
            f"{line.skew:.2f}",
        )
    if len(found.lines) > _LINES:
        table.caption = f"and {len(found.lines) - _LINES} more"
    return table


def plan_says(line: Line) -> str:
    """The time of a call by ``allgrad plan``, and its algorithm if another one ran."""
    if line.planned is None:
        return ""
    algorithm, time = line.planned
    return seconds(time) if algorithm in line.algorithms else f"{seconds(time)} ({algorithm})"


def _slowest(found: Findings, space: str) -> Table:
    columns = ("call", "line", ">number", ">at", ">took", ">waited", "for")
    table = _table("The slowest calls", *columns)
    for one in found.slowest:
        _add_row(
            table,
            one.kind.title.replace(" ", space),
            short_site(one.kind.site),
            f"{one.number:,}",
            seconds(one.began - found.began),
            seconds(one.took),
            seconds(one.waited),
            f"rank {one.waited_for}" if one.waited else "",
        )
    return table


def _last_calls(found: Findings, space: str) -> Table:
    table = _table("The last call of each rank", "rank", "call", "line", ">number", ">began", "")
    for one in found.last_calls:
        ended = one.error.partition("\n")[0] or "ended" if one.ended else "has not ended"
        _add_row(
            table,
            str(one.rank),
            one.kind.title.replace(" ", space),
            short_site(one.kind.site),
            f"{one.number:,}",
            f"{seconds(found.ended - one.began)} ago",
            Text(ended, "" if one.ended and not one.error else "bold red"),
        )
    return table


def _mismatch(one: Mismatch) -> Table:
    title = f"Call {one.number} of {one.group}: what each rank did"
    table = _table(title, "rank", "call")
    table.columns[-1].no_wrap = False  # a call with its sizes and its line is long
    for rank, words in one.by_rank.items():
        _add_row(table, str(rank), Text(words, "bold red" if rank in one.odd else ""))
    return table
