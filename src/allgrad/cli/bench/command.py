"""The command: choose the cases, show a progress bar, print and write the results."""

from __future__ import annotations

import contextlib
from importlib.util import find_spec
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from allgrad.cli.bench import calibrate as calibration
from allgrad.cli.bench import cases, run, show
from allgrad.cli.bench.baselines import implementations_of, words_of
from allgrad.cli.files import require_writable
from allgrad.errors import InputError
from allgrad.testing import Hosts, HostsUnavailable, why_no_hosts

if TYPE_CHECKING:
    from allgrad.cli.bench.cases import Case

__all__ = ["bench", "choose", "measure", "require_drawable"]


def choose(ranks: str, sizes: str, only: str) -> list[Case]:
    """The cases for the options, each a list with commas."""
    worlds = [int(word) if word.strip().isdecimal() else 0 for word in ranks.split(",")]
    if not all(2 <= world <= 16 for world in worlds):
        raise InputError(
            f"{ranks!r} are not numbers of ranks.\nGive numbers from 2 to 16, such as 2,4."
        )
    operations = [word.strip() for word in only.split(",")]
    unknown = [word for word in operations if word not in cases.OPERATIONS]
    if unknown:
        known = ", ".join(cases.OPERATIONS)
        raise InputError(f"There is no {', '.join(unknown)} to measure.\nGive some of {known}.")
    return cases.cases(worlds, [show.parse_bytes(word) for word in sizes.split(",")], operations)


def bench(
    *,
    ranks: Annotated[
        str | None, typer.Option(help="Numbers of ranks, with commas.", show_default="2,4")
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(help="Sizes of a piece, with commas.", show_default="4KiB,256KiB,4MiB,64MiB"),
    ] = None,
    only: Annotated[str, typer.Option(help="Collectives to measure, with commas.")] = ",".join(
        cases.OPERATIONS
    ),
    repeats: Annotated[
        int | None,
        typer.Option(min=2, help="Samples of each implementation; by size if not given."),
    ] = None,
    memory: Annotated[
        bool, typer.Option(help="Measure peak memory at the largest size, in new processes.")
    ] = True,
    hosts: Annotated[
        int | None,
        typer.Option(min=2, max=16, help="Number of hosts: network namespaces (Linux, root)."),
    ] = None,
    ranks_per_host: Annotated[int, typer.Option(min=1, max=8, help="Ranks on each host.")] = 4,
    link: Annotated[
        str | None,
        typer.Option(help="Rate of each host's link, such as 200mbit.", show_default="unlimited"),
    ] = None,
    peers: Annotated[
        str | None,
        typer.Option(help="Of the peers only these, with commas, beside the baseline."),
    ] = None,
    every_algorithm: Annotated[
        bool, typer.Option(help="Measure allgrad by every algorithm of its table, too.")
    ] = False,
    quick: Annotated[
        bool,
        typer.Option(
            help="Small pieces, 2 ranks, few samples, unless given; no memory: about a minute."
        ),
    ] = False,
    calibrate: Annotated[
        Path | None,
        typer.Option(help="Measure links and algorithms instead; write what allgrad plan reads."),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write all results to this file.")] = None,
    png: Annotated[
        Path | None, typer.Option(help="Draw the results to this file: a PNG, JPG, PDF or SVG.")
    ] = None,
) -> None:
    """Measure the collectives beside raw torch.distributed and its differentiable versions."""
    if hosts is not None and ranks is not None:
        raise typer.BadParameter("With --hosts give --ranks-per-host.", param_hint="--ranks")
    if quick:
        ranks, sizes, repeats, memory = ranks or "2", sizes or "4KiB,256KiB", repeats or 9, False
    if hosts is not None:
        if why_no_hosts():
            raise typer.BadParameter(
                f"Hosts cannot be made here: {why_no_hosts()}.", param_hint="--hosts"
            )
        ranks, memory = str(hosts * ranks_per_host), False
    for path, option in ((calibrate, "--calibrate"), (json, "--json"), (png, "--png")):
        require_writable(path, option)
    if png is not None:
        require_drawable(png)
    if calibrate is not None:
        _calibrate(calibrate, repeats, hosts, link)
        return
    try:
        chosen = choose(ranks or "2,4", sizes or "4KiB,256KiB,4MiB,64MiB", only)
        which = None if peers is None else _peers(peers, chosen)
    except InputError as error:
        raise typer.BadParameter(str(error)) from error
    try:
        with _hosts(hosts, ranks_per_host, link) as made:
            correct = measure(
                *(chosen, repeats, memory),
                json=json,
                png=png,
                hosts=made,
                peers=which,
                every_algorithm=every_algorithm,
            )
    except HostsUnavailable as error:
        raise typer.BadParameter(str(error), param_hint="--link") from error
    if not correct:
        raise typer.Exit(1)


def require_drawable(path: Path) -> None:
    """Refuse a plot that could not be written after the measurement."""
    if find_spec("matplotlib") is None:
        text = "A plot needs matplotlib: pip install 'allgrad[cli]'."
        raise typer.BadParameter(text, param_hint="--png")
    try:
        show.format_of(path)
    except InputError as error:
        raise typer.BadParameter(str(error), param_hint="--png") from error


def _peers(words: str, chosen: list[Case]) -> list[str]:
    given = words_of(words)
    every = dict.fromkeys(name for case in chosen for name in implementations_of(case, 0))
    names = [name for name in every if not name.startswith("allgrad")]
    unknown = given.difference(*map(words_of, names))
    if unknown:
        peers = ", ".join(f"'{name}'" for name in names)
        raise InputError(
            f"There is no {', '.join(sorted(unknown))} beside allgrad.\nGive some of {peers}."
        )
    return sorted(given)


def _calibrate(path: Path, repeats: int | None, hosts: int | None, link: str | None) -> None:
    found = run.machine()
    about = f"Gloo, {found['cores']} cores, torch {found['torch']}"
    if hosts is not None:
        about += f", links of {link or 'unlimited rate'}"
    with Console().status("measuring every algorithm with 2 and 4 ranks"):
        links = calibration.calibrate(about, repeats or 9, hosts, link)
    links.write(path)
    typer.echo(f"Wrote {path}. Use it with: allgrad plan --links {path}")


def _hosts(
    hosts: int | None, ranks_per_host: int, link: str | None
) -> contextlib.AbstractContextManager[Hosts | None]:
    if hosts is None:
        return contextlib.nullcontext()
    return Hosts(hosts, ranks_per_host=ranks_per_host, rate=link)


def measure(
    chosen: list[Case],
    repeats: int | None,
    memory: bool,
    *,
    json: Path | None,
    png: Path | None,
    hosts: Hosts | None = None,
    peers: list[str] | None = None,
    every_algorithm: bool = False,
) -> bool:
    """Measure, print, write, and tell whether allgrad's results were all correct."""
    console = Console()
    about = run.machine(hosts)
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
            size = show.format_bytes(case.nbytes)
            words = f"{case.title}, {size}, {case.world} ranks: {what}"
            progress.update(task, completed=chosen.index(case), description=words)
            if not console.is_terminal:  # the bar is shown on terminals only
                console.print(words)

        measured = []
        steps = run.run(
            *(chosen, repeats),
            memory=memory,
            tell=tell,
            hosts=hosts,
            peers=peers,
            every_algorithm=every_algorithm,
        )
        for found in steps:
            measured.append(found)
            if json is not None:  # after every case, so that an interrupted run keeps its results
                show.write_json(json, about, measured)
    for table in show.tables(measured):
        console.print(table)
    words = ", ".join(f"{name} {value}" for name, value in about.items() if value)
    console.print(Text(f"{words}. Medians, ± half the interquartile range."))
    if png is not None:
        show.draw(png, measured)
    return not any(
        summary.wrong
        for m in measured
        for name, summary in m.implementations.items()
        if name.startswith("allgrad")
    )
