"""``allgrad parity``: compare a training step on ranks with one process."""

from __future__ import annotations

import importlib
import inspect
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["parity"]


class Wrapper(Enum):
    """The wrappers that can be named on the command line."""

    DDP = "ddp"
    FSDP = "fsdp"
    NONE = "none"


def parity(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="A function that returns the arguments of allgrad.testing.parity as a dict.",
        ),
    ],
    *,
    ranks: Annotated[int | None, typer.Option(min=2, help="Number of processes.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Number of training steps.")] = None,
    wrapper: Annotated[Wrapper | None, typer.Option(help="Wrapper of the model.")] = None,
) -> None:
    """Run a training step on real ranks and in one process on the joined batch, and compare.

    Options replace what the function gives. The command fails if the step differs, and says where,
    by how much, and what it looks like.
    """
    from allgrad.testing import RankFailed
    from allgrad.testing import parity as compare

    arguments = _arguments(target)
    given = {"ranks": ranks, "steps": steps}
    arguments |= {name: value for name, value in given.items() if value is not None}
    if wrapper is not None:
        arguments["wrapper"] = None if wrapper is Wrapper.NONE else wrapper.value
    try:
        inspect.signature(compare).bind(**arguments)
    except TypeError as error:
        words = f"{target} gives other arguments than parity takes: {error}."
        raise typer.BadParameter(words, param_hint="target") from error
    try:
        report = compare(**arguments)
    except RankFailed as error:  # it has the traceback of the rank; ours says nothing more
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    typer.echo(str(report))
    if not report:
        raise typer.Exit(1)


def _arguments(target: str) -> dict[str, Any]:
    """Call the function that ``target`` names; modules are searched in this directory too."""
    module, _, function = target.partition(":")
    if not (module and function):
        raise typer.BadParameter("Give MODULE:FUNCTION.", param_hint="target")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise typer.BadParameter(str(error), param_hint="target") from error
    if not callable(found):
        raise typer.BadParameter(f"{target} is no function.", param_hint="target")
    needed = [name for name, p in inspect.signature(found).parameters.items() if _is_needed(p)]
    if needed:
        raise typer.BadParameter(
            f"{target} needs arguments: {', '.join(needed)}.\nName a function that takes none.",
            param_hint="target",
        )
    arguments = found()
    if not isinstance(arguments, dict):
        raise typer.BadParameter(
            f"{target} returned {type(arguments).__name__}, not a dict.", param_hint="target"
        )
    return arguments


def _is_needed(parameter: inspect.Parameter) -> bool:
    several = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return parameter.default is inspect.Parameter.empty and parameter.kind not in several
