"""Predictions as tables on the terminal and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from allgrad._wire.link_model import Links, Prediction
    from allgrad.cli.plan.clip_step import StepPlan

__all__ = ["Row", "calls_table", "plain", "step_table"]


class Row(NamedTuple):
    """One call in one world."""

    ranks: int
    hosts: int
    operation: str
    nbytes: int
    prediction: Prediction


def calls_table(rows: Sequence[Row]) -> Table:
    """An operation on each row, a size in each column; of one world."""
    sizes = sorted({row.nbytes for row in rows})
    first = rows[0]
    where = f"{first.ranks:,} ranks on {_count(first.hosts, 'host')}"
    table = Table(title=f"{where}: algorithm, time, memory of the busiest rank")
    # On a narrow terminal every column is broken into lines; one alone would vanish.
    table.add_column("", overflow="fold")
    for nbytes in sizes:
        table.add_column(in_bytes(nbytes), justify="right", overflow="fold")
    for operation in dict.fromkeys(row.operation for row in rows):
        found = {row.nbytes: row.prediction for row in rows if row.operation == operation}
        cells = [
            f"{p.algorithm}\n[bold]{in_seconds(p.seconds)}[/bold]  {in_bytes(p.memory)}"
            for p in (found[nbytes] for nbytes in sizes)
        ]
        table.add_row(operation, *cells, end_section=True)
    return table


def step_table(plans: Sequence[StepPlan], title: str, flops: float | None) -> Table:
    """A step of the loss: its calls, and the sum, for each world."""
    table = Table(title=title)
    table.add_column("ranks", justify="right", no_wrap=True)
    table.add_column("calls of a rank", overflow="fold")
    for name in ("bytes of each", "time"):
        table.add_column(name, justify="right", overflow="fold")
    for plan in plans:
        label = f"{plan.ranks:,}"
        for call in plan.calls:
            often = "" if call.calls == 1 else f"{call.calls:,} x "
            words = f"{call.purpose}: {often}{call.operation}, {call.algorithm}"
            table.add_row(label, words, in_bytes(call.nbytes), in_seconds(call.seconds))
            label = ""
        keys = "keys around a ring" if plan.ring else "keys gathered"
        table.add_row(
            "", f"[bold]all, {keys}[/bold]", "", f"[bold]{in_seconds(plan.seconds)}[/bold]"
        )
        if flops is not None:
            table.add_row("", "matrix products", "", in_seconds(plan.operations / flops))
        table.add_row("", "memory beside the inputs", in_bytes(plan.memory), "", end_section=True)
    return table


def plain(links: Links, rows: Sequence[Row], plans: Sequence[StepPlan]) -> dict[str, Any]:
    """Numbers and strings, for JSON."""
    return {
        "links": asdict(links),
        "calls": [
            {"ranks": r.ranks, "hosts": r.hosts, "operation": r.operation, "bytes": r.nbytes}
            | r.prediction._asdict()
            for r in rows
        ],
        "clip_loss": [
            plan._asdict()
            | {"calls": [call._asdict() for call in plan.calls], "seconds": plan.seconds}
            for plan in plans
        ],
    }


def in_seconds(time: float) -> str:
    """Three digits in the fitting unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if time >= size:
            return f"{time / size:.3g} {unit}"
    return f"{time / 1e-6:.3g} us"


def in_bytes(nbytes: float) -> str:
    """Three digits in the fitting unit."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} B"


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"
