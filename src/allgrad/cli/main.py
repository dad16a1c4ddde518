"""The commands, their options and their help."""

from __future__ import annotations

from typing import Annotated

import typer

from allgrad.cli import demo as demo_command

app = typer.Typer(
    help="Collectives with exact gradients for PyTorch.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)


@app.callback()
def _allgrad() -> None:
    """Keep the commands' names even while there is only one."""


@app.command()
def demo(
    ranks: Annotated[int, typer.Option(min=1, max=16, help="How many processes.")] = 4,
) -> None:
    """Gather pieces of unequal length over real processes, with gradient, beside one process."""
    if not demo_command.show(ranks):
        raise typer.Exit(1)
