"""``allgrad report``: a recording as text, as a page, as a trace."""

from __future__ import annotations

import os
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from allgrad.errors import InputError

__all__ = ["report"]

_UNLIMITED = 10_000  # columns


def report(
    directory: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="What ag.recorded wrote.")
    ],
    *,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", dir_okay=False, help="Write a page, one HTML file."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Write a trace for Perfetto or chrome://tracing, JSON."),
    ] = None,
    links: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Table of links for predictions, as of allgrad plan."),
    ] = None,
) -> None:
    """Show a recording: who waits for whom, the slowest calls, what differs, what hangs.

    Without -o and --trace it prints text. It may run while the recorded job runs.
    """
    from allgrad._wire.link_model import Links
    from allgrad.report.findings import find
    from allgrad.report.page import write_page
    from allgrad.report.text import summary, text
    from allgrad.report.trace import write_trace

    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=_UNLIMITED)  # rich takes a file or a pipe for 80 columns
    try:
        found = find(directory, None if links is None else Links.read(links))
    except InputError as error:
        raise typer.BadParameter(str(error), param_hint="DIRECTORY") from error
    if out is None and trace is None:
        console.print(text(found))
        return
    console.print(Text(summary(found)))
    for file, write in ((out, write_page), (trace, write_trace)):
        if file is not None:
            try:
                console.print(Text(write(found, file)), soft_wrap=True)
            except OSError as error:
                raise typer.BadParameter(str(error), param_hint=str(file)) from error
