"""How this process was started: by torchrun, by srun, by hand, or alone."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from allgrad.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Launch", "first_host", "launch_of"]

_LAST_PORT = 65_535


@dataclass(frozen=True, slots=True)
class Launch:
    """One rank's place in the job, and where the job's store is."""

    by: str
    rank: int
    size: int
    local_rank: int
    host: str
    port: int
    serves_store: bool = False
    attempt: str = "0"


def launch_of(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """Read the launcher's variables; ``None`` when there are none: this process is alone.

    srun starts processes without RANK: they take their places from SLURM's own variables.
    """
    if "RANK" in environment or "WORLD_SIZE" in environment:
        agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        rank, size = _number("RANK", environment), _number("WORLD_SIZE", environment)
        return Launch(
            "torchrun" if "TORCHELASTIC_RUN_ID" in environment else "RANK and WORLD_SIZE",
            _within(rank, size, "RANK", "WORLD_SIZE"),
            size,
            _number("LOCAL_RANK", environment, 0),
            _text("MASTER_ADDR", environment),
            _port(environment),
            serves_store=not agent and rank == 0,
            attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )
    if "SLURM_PROCID" in environment and "SLURM_STEP_ID" in environment:
        rank, size = _number("SLURM_PROCID", environment), _number("SLURM_NTASKS", environment)
        nodes = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_NODELIST", ""))
        job = _number("SLURM_JOB_ID", environment, 0)
        return Launch(
            "srun",
            _within(rank, size, "SLURM_PROCID", "SLURM_NTASKS"),
            size,
            _number("SLURM_LOCALID", environment, 0),
            environment.get("MASTER_ADDR") or first_host(nodes),
            _port(environment, 20_000 + job % 10_000),
            serves_store=rank == 0,
            attempt=f"{job}.{environment['SLURM_STEP_ID']}",
        )
    return None


def first_host(nodes: str) -> str:
    """The first host of a SLURM list: ``gpu[07-09,12],login`` begins with ``gpu07``."""
    found = re.match(r"([^\[,]+)(?:\[(\w+)[^\]]*\])?([^\[,]*)", nodes)
    if found is None:
        raise InputError(
            f"SLURM_NODELIST={nodes!r} names no host, and MASTER_ADDR is not set.\n"
            "Set MASTER_ADDR to the host of rank 0."
        )
    return "".join(part or "" for part in found.groups())


def _text(name: str, environment: Mapping[str, str]) -> str:
    value = environment.get(name)
    if not value:
        raise InputError(
            f"RANK or WORLD_SIZE is set, but not {name}.\n"
            "Start with torchrun or srun, which set all of them, or unset RANK and WORLD_SIZE."
        )
    return value


def _number(name: str, environment: Mapping[str, str], default: int | None = None) -> int:
    if default is not None and name not in environment:
        return default
    value = _text(name, environment)
    if not value.isdecimal():
        raise InputError(f"{name}={value!r} is not a number.\nStart with torchrun or srun.")
    return int(value)


def _port(environment: Mapping[str, str], default: int | None = None) -> int:
    port = _number("MASTER_PORT", environment, default)
    if not 1 <= port <= _LAST_PORT:
        raise InputError(
            f"MASTER_PORT={port} is not a port.\nGive a free port of the host of rank 0, 1 to {_LAST_PORT}."
        )
    return port


def _within(rank: int, size: int, rank_name: str, size_name: str) -> int:
    if rank >= size:
        raise InputError(
            f"{rank_name}={rank}, but {size_name}={size}.\nRanks are 0 to {size_name} - 1."
        )
    return rank
