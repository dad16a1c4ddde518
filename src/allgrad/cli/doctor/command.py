"""The command: as one rank of a job that a launcher started, or with ranks of its own."""

from __future__ import annotations

from typing import Annotated

import torch
import typer

from allgrad._wire.world import Rendezvous, rank_of, size_of, stop
from allgrad.cli.doctor import rules
from allgrad.cli.doctor.examination import Report, examine
from allgrad.cli.doctor.facts import local_facts
from allgrad.cli.doctor.findings import Status, problem
from allgrad.cli.doctor.launch import Launch, launch_of
from allgrad.cli.doctor.show import as_json, as_text
from allgrad.errors import AllgradError, InputError
from allgrad.testing import run_ranks

__all__ = ["doctor"]


def doctor(
    *,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=64,
            help="Ranks to start, unless a launcher has.",
            show_default="2, or one for each GPU",
        ),
    ] = None,
    deadline: Annotated[
        float, typer.Option(min=1, help="Seconds to wait for the store and for all ranks.")
    ] = 60.0,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Examine this machine, or the job this is started in: ok, or what is wrong and what to do.

    Alone, it starts ranks on this machine. Under torchrun or srun every rank takes part, and one
    reports. Ends with status 1 if there is a problem, at most 5 seconds after the deadline.
    """
    try:
        launch = launch_of()
    except InputError as error:
        raise typer.BadParameter(str(error), param_hint="the environment") from error
    if launch is None:
        report: Report | None = examine_alone(ranks or _default_ranks(), deadline)
    else:
        report = examine(launch, local_facts(launch.local_rank), deadline=deadline)
    # A launcher ends all ranks when one fails: only the rank that has printed may.
    if report is not None:
        typer.echo(as_json(report) if json else as_text(report))
        raise typer.Exit(report.status is Status.PROBLEM)


def examine_alone(ranks: int, deadline: float) -> Report:
    """Examine ranks that are started here, if this process sees no problem by itself."""
    own = local_facts()
    findings = rules.examine({0: own})
    by = "allgrad doctor"
    if not any(finding.status is Status.PROBLEM for finding in findings):
        store = Rendezvous()
        try:
            limit = deadline + 10
            reports = run_ranks(_examine_as_rank, ranks, store.port, deadline, timeout=limit)
            return next(report for report in reports if report is not None)
        except AllgradError as error:
            findings.append(
                problem(
                    "ranks",
                    str(error),
                    f"A world of {ranks} ranks on this machine did not work.",
                    "Look at the error of the first rank that failed.",
                )
            )
    return Report(by, ranks, findings, {0: own})


def _default_ranks() -> int:
    return min(64, max(2, torch.cuda.device_count()))


def _examine_as_rank(port: int, deadline: float) -> Report | None:
    """On a rank: leave the world it was started in, and examine one that begins with the store."""
    rank, size = rank_of(), size_of()
    stop()
    launch = Launch("allgrad doctor", rank, size, rank, "127.0.0.1", port)
    return examine(launch, local_facts(rank), deadline=deadline)
