"""The results of a benchmark: tables on the terminal, JSON, a plot."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rich.table import Table

from allgrad.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from allgrad.cli.bench.run import Measured, Summary

__all__ = ["draw", "format_bytes", "format_of", "parse_bytes", "tables", "write_json"]

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_PLOTS = ("png", "jpg", "pdf", "svg")
_PARTS = {"forward": "forward", "both": "forward + backward"}


def parse_bytes(words: str) -> int:
    """Parse ``4KiB``, ``64 MiB`` or ``4096``: a multiple of 8 rows of 256 bytes."""
    number, unit = words.strip(), "B"
    for ending in ("KiB", "MiB", "GiB", "B"):
        if number.lower().endswith(ending.lower()):
            number, unit = number[: -len(ending)].strip(), ending
            break
    nbytes = int(number) * _UNITS[unit] if number.isdecimal() else 0
    if nbytes < 2048 or nbytes % 2048:
        raise InputError(f"{words!r} is not a size.\nGive multiples of 2 KiB, such as 4KiB,64MiB.")
    return nbytes


def format_bytes(nbytes: int) -> str:
    """Bytes as text, in the largest fitting unit."""
    if nbytes == 4:
        return "1 element"
    for unit in ("MiB", "KiB"):
        if nbytes >= _UNITS[unit] and nbytes % _UNITS[unit] == 0:
            return f"{nbytes // _UNITS[unit]} {unit}"
    return f"{nbytes} B"


def tables(measured: Sequence[Measured]) -> Iterator[Table]:
    """A table for each number of ranks and direction, and one for memory."""
    for world in _distinct(m.case.world for m in measured):
        here = [m for m in measured if m.case.world == world]
        for part, words in _PARTS.items():
            title = f"{words}, {world} ranks: milliseconds, and multiples of the baseline (*)"
            yield _times([m for m in here if m.case.tensors == 1], part, title)
            yield from (
                _many(m, part, f"{words}, {world} ranks") for m in here if m.case.tensors > 1
            )
    with_memory = [m for m in measured if any(s.memory for s in m.implementations.values())]
    if with_memory:
        yield _memory(with_memory)


def _times(measured: Sequence[Measured], part: str, title: str) -> Table:
    sizes = sorted({m.case.nbytes for m in measured})
    table = Table("", title=title)
    for nbytes in sizes:
        table.add_column(format_bytes(nbytes), justify="right", no_wrap=True)
    for name_of_rows in _distinct(m.case.title for m in measured):
        rows = [m for m in measured if m.case.title == name_of_rows]
        by_size = {m.case.nbytes: m for m in rows}
        table.add_row(f"[bold]{name_of_rows}[/bold]")
        for name in rows[0].implementations:
            cells = [_cell(by_size.get(nbytes), name, part) for nbytes in sizes]
            table.add_row(_marked(rows[0], name), *cells)
        table.add_section()
    return table


def _many(measured: Measured, part: str, words: str) -> Table:
    case = measured.case
    each = f"{case.tensors} tensors of {format_bytes(case.nbytes)}"
    table = Table("", each, title=f"{case.operation}, {words}")
    for name in measured.implementations:
        table.add_row(_marked(measured, name), _cell(measured, name, part).replace("\n", "  "))
    return table


def _marked(measured: Measured, name: str) -> str:
    return f"  {name}*" if name == measured.base else f"  {name}"


def _cell(measured: Measured | None, name: str, part: str) -> str:
    if measured is None:
        return ""
    summary: Summary = measured.implementations[name]
    spread = getattr(summary, part)
    quartiles = 50 * (spread.high - spread.low) / spread.median
    time = f"{1e3 * spread.median:.3g} ±{quartiles:.0f}%"
    if summary.wrong == "values" or (summary.wrong and part == "both"):
        return f"{time}\n[red]wrong {summary.wrong}[/red]"
    return f"{time}\n[bold]{measured.ratio(name, part):.2f}[/bold]"


def _memory(measured: Sequence[Measured]) -> Table:
    table = Table(
        *("collective", "ranks", "implementation", "result", "forward", "forward + backward"),
        title="peak memory above the memory before: MiB, and multiples of the result",
    )
    for m in measured:
        label = (f"{m.case.title}, {format_bytes(m.case.nbytes)}", str(m.case.world))
        for name, summary in m.implementations.items():
            peak = summary.memory
            assert peak is not None
            cells = [
                f"{nbytes / 2**20:.0f}  [bold]{nbytes / peak.result:.2f}[/bold]"
                for nbytes in (peak.forward, peak.both)
            ]
            table.add_row(*label, name, f"{peak.result / 2**20:.0f}", *cells)
            label = ("", "")
        table.add_section()
    return table


def write_json(path: Path, about: dict[str, Any], measured: Sequence[Measured]) -> None:
    """Write all results, for other programs."""
    path.write_text(json.dumps(about | {"cases": [m.plain() for m in measured]}, indent=1) + "\n")


def format_of(path: Path) -> str:
    """The format of a plot by the name of its file; a name without an ending is a PNG."""
    ending = path.suffix.removeprefix(".").lower() or _PLOTS[0]
    if ending not in _PLOTS:
        raise InputError(
            f"{path} cannot be drawn: its name ends in none of {', '.join(_PLOTS)}.\n"
            "Name a file such as run.png."
        )
    return ending


def draw(path: Path, measured: Sequence[Measured]) -> None:
    """A panel for each collective and number of ranks: multiples of the baseline, by size."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    shown = [m for m in measured if m.case.tensors == 1]
    titles = _distinct(m.case.title for m in shown)
    worlds = _distinct(m.case.world for m in shown)
    figure, panels = plt.subplots(
        len(worlds), len(titles), figsize=(3.2 * len(titles), 3.4 * len(worlds)), squeeze=False
    )
    for row, world in zip(panels, worlds, strict=True):
        for panel, title in zip(row, titles, strict=True):
            here = [m for m in shown if (m.case.title, m.case.world) == (title, world)]
            _panel(panel, sorted(here, key=lambda m: m.case.nbytes), f"{title}, {world} ranks")
    figure.suptitle("Forward + backward, as multiples of the baseline (lower is faster)")
    figure.tight_layout()
    figure.savefig(path, dpi=120, format=format_of(path))
    plt.close(figure)


def _panel(panel: Any, measured: Sequence[Measured], title: str) -> None:
    positions = range(len(measured))
    for name in measured[0].implementations if measured else ():
        ratios = [m.ratio(name, "both") for m in measured]
        wrong = any(m.implementations[name].wrong for m in measured)
        style = {"linestyle": ":"} if wrong else {}
        width = 2.5 if name.startswith("allgrad") else 1.2
        label = f"{name} (wrong)" if wrong else name
        panel.plot(
            positions, ratios, marker="o", markersize=3, linewidth=width, label=label, **style
        )
    panel.set_xticks(
        positions, [format_bytes(m.case.nbytes) for m in measured], fontsize=7, rotation=30
    )
    panel.set_yscale("log", base=2)
    panel.yaxis.set_major_formatter("{x:g}")
    panel.set_title(title, fontsize=9)
    panel.grid(alpha=0.3)
    panel.legend(fontsize=6)


def _distinct(values: Any) -> list[Any]:
    return list(dict.fromkeys(values))
