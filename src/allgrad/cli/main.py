"""The commands, their options and their help."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import torch
import typer

from allgrad._core.version import __version__
from allgrad.cli.bench.command import bench
from allgrad.cli.doctor.command import doctor
from allgrad.cli.files import require_writable
from allgrad.cli.parity import parity
from allgrad.cli.plan.command import plan
from allgrad.cli.report import report
from allgrad.errors import GroupError

app = typer.Typer(
    help="Collectives with exact gradients for PyTorch.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)


class Loss(Enum):
    """Losses of ``allgrad.losses`` that the demo can train with."""

    CLIP = "clip"
    SIGLIP = "siglip"
    INFO_NCE = "info_nce"


class Backend(Enum):
    """Backends that can run the demo."""

    GLOO = "gloo"
    NCCL = "nccl"


app.command()(bench)
app.command()(report)
app.command()(doctor)
app.command()(parity)
app.command()(plan)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"allgrad {__version__}, torch {torch.__version__}")
        raise typer.Exit


@app.callback()
def _allgrad(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the versions and exit."
        ),
    ] = False,
) -> None:
    """Collectives with exact gradients for PyTorch."""


@app.command()
def demo(
    *,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, max=16, help="Number of processes.", show_default="4, or torchrun's"),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of training steps.")] = 200,
    loss: Annotated[Loss, typer.Option(help="Loss to train with.")] = Loss.CLIP,
    backend: Annotated[Backend, typer.Option(help="Backend of torch.distributed.")] = Backend.GLOO,
    out: Annotated[
        Path, typer.Option(dir_okay=False, writable=True, help="File for the plot, a PNG.")
    ] = Path("allgrad-demo.png"),
) -> None:
    """Train on real ranks, then in one process, to match digits and captions: the same result.

    The ranks hold unequal batches. The demo fails if any parameter differs by more than 1e-8.
    """
    try:  # imported here: matplotlib takes a second, which other commands need not wait for
        from allgrad.cli.demo import command as demo_command
        from allgrad.cli.demo.training import TrainingConfig
        from allgrad.cli.demo.worlds import torchrun_world
    except ModuleNotFoundError as error:
        sys.exit(f"{error}. The demo needs its extras: pip install 'allgrad[cli,testing]'")
    try:
        world = torchrun_world()
    except GroupError as error:
        raise typer.BadParameter(str(error), param_hint="RANK and WORLD_SIZE") from error
    size = world[1] if world else ranks or 4
    if ranks not in {None, size}:
        raise typer.BadParameter(f"torchrun started {size} ranks.", param_hint="--ranks")
    if backend is Backend.NCCL and torch.cuda.device_count() < size:
        found = torch.cuda.device_count()
        raise typer.BadParameter(
            f"nccl needs a GPU for each of {size} ranks; there are {found}.", param_hint="--backend"
        )
    require_writable(out, "--out")
    device = "cuda" if backend is Backend.NCCL else "cpu"
    config = TrainingConfig(loss.value, steps, size, device)
    if not demo_command.run(config, backend=backend.value, out=out):
        raise typer.Exit(1)
