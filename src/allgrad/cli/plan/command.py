"""The command: options become a world and a table of links; predictions are printed and written."""

from __future__ import annotations

import json as json_module
import math
from enum import Enum
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.text import Text

from allgrad._wire import algorithms
from allgrad._wire.groups import Backend
from allgrad._wire.link_model import LOOPBACK, Links, predict, situation, with_given, world
from allgrad.cli.bench.show import parse_bytes
from allgrad.cli.files import require_writable
from allgrad.cli.plan import show
from allgrad.cli.plan.clip_step import ClipStep
from allgrad.errors import InputError

__all__ = ["plan"]

_MOST_RANKS = 1 << 20
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_RATES = {"KB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9, "Mbit": 1e6 / 8, "Gbit": 1e9 / 8}


class Dtype(Enum):
    """Dtypes of features."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Kind(Enum):
    """Backends that are modelled."""

    GLOO = "gloo"
    NCCL = "nccl"


def parse_quantity(words: str, units: dict[str, float], example: str) -> float:
    """Parse ``20us`` or ``25 Gbit`` by a table of units."""
    for unit in sorted(units, key=len, reverse=True):
        number = words.strip()
        if number.lower().endswith(unit.lower()):
            try:
                value = float(number[: -len(unit)]) * units[unit]
            except ValueError:
                break
            if 0 < value < math.inf:
                return value
            break
    raise InputError(f"{words!r} is not a quantity.\nGive a positive one such as {example}.")


def plan(
    *,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, with commas.")] = "64,1024,16384",
    ranks_per_host: Annotated[int, typer.Option(min=1, help="Ranks on each host.")] = 8,
    sizes: Annotated[
        str, typer.Option(help="Sizes of what a rank passes, with commas.")
    ] = "4KiB,256KiB,4MiB",
    only: Annotated[str, typer.Option(help="Operations, with commas.")] = ",".join(
        algorithms.TABLE
    ),
    backend: Annotated[Kind, typer.Option(help="Backend of torch.distributed.")] = Kind.GLOO,
    links: Annotated[
        Path | None, typer.Option(help="Table of links, made by allgrad bench --calibrate FILE.")
    ] = None,
    latency: Annotated[str | None, typer.Option(help="Of a step in a host, such as 20us.")] = None,
    bandwidth: Annotated[
        str | None, typer.Option(help="Of a rank in a host, both directions together: 300GB/s.")
    ] = None,
    between_latency: Annotated[
        str | None, typer.Option(help="Of a step between hosts, such as 50us.")
    ] = None,
    between_bandwidth: Annotated[
        str | None, typer.Option(help="Of a host's link, both directions together: 25Gbit.")
    ] = None,
    cores: Annotated[int | None, typer.Option(min=1, help="Cores of a host.")] = None,
    pairs: Annotated[int, typer.Option(min=1, help="clip_loss: pairs on each rank.")] = 256,
    width: Annotated[int, typer.Option(min=1, help="clip_loss: elements of a feature.")] = 512,
    dtype: Annotated[Dtype, typer.Option(help="clip_loss: dtype of features.")] = Dtype.FLOAT32,
    tflops: Annotated[
        float | None,
        typer.Option(min=1e-6, help="Matrix products of a rank, 10^12 operations a second."),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write all predictions to this file.")] = None,
) -> None:
    """Predict calls and a step of clip_loss in any world: algorithm, time, memory.

    From each algorithm's cost formula and a table of links; nothing is sent. docs/plan.md sets
    predictions beside measurements.
    """
    try:
        worlds = _numbers(ranks)
        sent = [parse_bytes(word) for word in sizes.split(",")]
        operations = _operations(only)
        table = LOOPBACK if links is None else Links.read(links)
        table = with_given(
            table,
            latency=_time(latency),
            backend_latency=_time(latency),
            bandwidth=_rate(bandwidth),
            between_latency=_time(between_latency),
            between_bandwidth=_rate(between_bandwidth),
            cores=cores,
        )
    except InputError as error:
        raise typer.BadParameter(str(error)) from error
    require_writable(json, "--json")
    kind = Backend(backend.value)
    step = ClipStep(pairs, width, getattr(torch, dtype.value), kind)
    console, rows, plans = Console(), [], []
    for size in worlds:
        topology = world(size, ranks_per_host)
        here = []
        for operation in operations:
            for nbytes in sent:
                s = situation(operation, size, nbytes, backend=kind, topology=topology)
                here.append(show.Row(size, s.hosts, operation, nbytes, predict(s, table)))
        console.print(show.calls_table(here))
        rows += here
        plans.append(step.plan(size, table, topology))
    title = f"a step of clip_loss: {pairs} pairs a rank, {width} x {dtype.value}, sizes given"
    flops = None if tflops is None else tflops * 1e12
    console.print(show.step_table(plans, title, flops))
    given = f"links: {table.about or 'given'}"
    advice = "Predicted, not measured: see docs/plan.md for how far to trust it."
    console.print(Text(f"{given}. {advice}"))
    if json is not None:
        json.write_text(json_module.dumps(show.plain(table, rows, plans), indent=1) + "\n")


def _numbers(words: str) -> list[int]:
    found = [int(word) if word.strip().isdecimal() else 0 for word in words.split(",")]
    if not all(2 <= number <= _MOST_RANKS for number in found):
        raise InputError(
            f"{words!r} are not numbers of ranks.\nGive numbers from 2 to {_MOST_RANKS:,}, "
            "such as 64,1024."
        )
    return found


def _operations(words: str) -> list[str]:
    found = [word.strip() for word in words.split(",")]
    unknown = [word for word in found if word not in algorithms.TABLE]
    if unknown:
        known = ", ".join(algorithms.TABLE)
        raise InputError(f"There is no {', '.join(unknown)} to plan.\nGive some of {known}.")
    return found


def _time(words: str | None) -> float | None:
    return None if words is None else parse_quantity(words, _SECONDS, "20us")


def _rate(words: str | None) -> float | None:
    return None if words is None else parse_quantity(words, _RATES, "25Gbit or 3GB/s")
