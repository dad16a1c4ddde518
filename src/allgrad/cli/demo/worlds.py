"""Where the training runs: on ranks started here, in the world of torchrun, or in one process."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from rich.console import Console

from allgrad._wire.world import World, rank_of, stop
from allgrad.cli.demo.progress import progress_of
from allgrad.cli.demo.training import (
    TrainingConfig,
    TrainingResult,
    train_in_one_process,
    train_on_ranks,
)
from allgrad.errors import GroupError
from allgrad.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["torchrun_world", "train_alone", "train_in_torchrun_world", "train_on_new_ranks"]


def torchrun_world(environment: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """The rank and the world size that torchrun gave this process; None without torchrun."""
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    rank, size = environment["RANK"], environment["WORLD_SIZE"]
    local = environment.get("LOCAL_WORLD_SIZE") == size and rank.isdecimal() and size.isdecimal()
    if not local or environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise GroupError(
            "They are set, but not by torchrun on this machine only.\n"
            "Use torchrun --standalone, or unset them: then the demo starts its own ranks."
        )
    return int(rank), int(size)


def train_in_torchrun_world(config: TrainingConfig, backend: str) -> TrainingResult:
    """Train as one rank of the world of torchrun; leave the world afterwards."""
    rank, size = torchrun_world() or (0, 1)
    World.start(
        rank, size, backend=backend, port=int(os.environ["MASTER_PORT"]), name="allgrad demo"
    )
    try:
        return _on_rank(config)
    finally:
        stop()


def train_on_new_ranks(config: TrainingConfig, backend: str) -> TrainingResult:
    """Train on new ranks, and return the result of rank 0."""
    limit = 120.0 + config.steps
    try:
        return run_ranks(_on_rank, config.ranks, config, backend=backend, timeout=limit)[0]
    finally:
        Console().show_cursor()  # rank 0 may have ended while its bar was shown


def train_alone(config: TrainingConfig) -> TrainingResult:
    """Train in this process, on one thread: small matrices are slower on several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with progress_of("one process", config.steps) as on_step:
            return train_in_one_process(config, on_step)
    finally:
        torch.set_num_threads(threads)


def _on_rank(config: TrainingConfig) -> TrainingResult:
    """Train; rank 0 shows the progress on the terminal."""
    if rank_of() != 0:
        return train_on_ranks(config, lambda step, loss, accuracy: None)  # noqa: ARG005
    with progress_of(f"{config.ranks_text:<11}", config.steps) as on_step:
        return train_on_ranks(config, on_step)
