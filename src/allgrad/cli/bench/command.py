"""The command: which cases, a progress bar while they run, and what comes of it."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from allgrad.cli.bench import cases, run, show
from allgrad.errors import InputError

if TYPE_CHECKING:
    from allgrad.cli.bench.cases import Case

__all__ = ["bench", "choose", "measure"]


def choose(ranks: str, sizes: str, only: str) -> list[Case]:
    """Read the options, each a list with commas."""
    worlds = [int(word) if word.strip().isdecimal() else 0 for word in ranks.split(",")]
    if not all(2 <= world <= 16 for world in worlds):
        raise InputError(f"{ranks!r} are not worlds.\nGive numbers of ranks from 2 to 16: 2,4.")
    operations = [word.strip() for word in only.split(",")]
    unknown = [word for word in operations if word not in cases.OPERATIONS]
    if unknown:
        known = ", ".join(cases.OPERATIONS)
        raise InputError(f"There is no {', '.join(unknown)} to measure.\nGive some of {known}.")
    return cases.cases(worlds, [show.as_bytes(word) for word in sizes.split(",")], operations)


def bench(
    *,
    ranks: Annotated[str, typer.Option(help="Worlds to measure, with commas.")] = "2,4",
    sizes: Annotated[str, typer.Option(help="Sizes of a piece.")] = "4KiB,256KiB,4MiB,64MiB",
    only: Annotated[str, typer.Option(help="Collectives to measure.")] = ",".join(cases.OPERATIONS),
    repeats: Annotated[
        int | None, typer.Option(min=2, help="Samples of each way; by size if not given.")
    ] = None,
    memory: Annotated[
        bool, typer.Option(help="Peak memory at the largest size, in new processes.")
    ] = True,
    quick: Annotated[
        bool, typer.Option(help="Small pieces, 2 ranks, few samples, no memory: a minute.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write all figures there.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw them there.")] = None,
) -> None:
    """Measure the collectives beside raw torch.distributed and its differentiable versions."""
    if quick:
        ranks, sizes, repeats, memory = "2", "4KiB,256KiB", repeats or 9, False
    try:
        chosen = choose(ranks, sizes, only)
    except InputError as error:
        raise typer.BadParameter(str(error)) from error
    if not measure(chosen, repeats, memory, json, png):
        raise typer.Exit(1)


def measure(
    chosen: list[Case], repeats: int | None, memory: bool, json: Path | None, png: Path | None
) -> bool:
    """Measure, print, write, and tell whether allgrad's own ways were right everywhere."""
    console = Console()
    about = run.machine()
    with Progress(
        TextColumn("{task.description:<44}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    ) as progress:
        task = progress.add_task("starting", total=len(chosen))

        def tell(case: Case, what: str) -> None:
            size = show.in_words(case.nbytes)
            words = f"{case.title}, {size}, {case.world} ranks: {what}"
            progress.update(task, completed=chosen.index(case), description=words)
            if not console.is_terminal:  # no bar there
                console.print(words)

        measured = []
        for found in run.run(chosen, repeats, memory=memory, tell=tell):
            measured.append(found)
            if json is not None:  # after every case: what is measured stays when the run is ended
                show.write_json(json, about, measured)
    for table in show.tables(measured):
        console.print(table)
    words = ", ".join(f"{name} {value}" for name, value in about.items() if value)
    console.print(f"{words}. Medians, ± half of what the middle half of the samples spans.")
    if png is not None:
        show.draw(png, measured)
    return not any(
        summary.wrong
        for m in measured
        for name, summary in m.ways.items()
        if name.startswith("allgrad")
    )
