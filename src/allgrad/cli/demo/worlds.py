"""Who trains: ranks started here, the world that torchrun started, or one process alone."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from rich.console import Console

from allgrad._wire.world import World, rank_of, stop
from allgrad.cli.demo.progress import watching
from allgrad.cli.demo.training import Course, Run, by_one_process, by_ranks
from allgrad.errors import GroupError
from allgrad.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["alone", "in_torchruns_world", "on_new_ranks", "torchruns_world"]


def torchruns_world(environment: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """Give the rank of this process and the size of the world that torchrun started it for, if so."""
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    size = environment["WORLD_SIZE"]
    local = environment.get("LOCAL_WORLD_SIZE") == size
    if not local or environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise GroupError(
            "They are set, but not by a torchrun on this machine alone.\n"
            "Use torchrun --standalone, or unset them and the demo starts ranks of its own."
        )
    return int(environment["RANK"]), int(size)


def in_torchruns_world(course: Course, backend: str) -> Run:
    """Train as one rank among those torchrun started; afterwards each process is alone again."""
    rank, size = torchruns_world() or (0, 1)
    World.start(
        rank, size, backend=backend, port=int(os.environ["MASTER_PORT"]), name="allgrad demo"
    )
    try:
        return _on_rank(course)
    finally:
        stop()


def on_new_ranks(course: Course, backend: str) -> Run:
    """Train on ranks of our own, and give what rank 0 has."""
    limit = 120.0 + course.steps
    try:
        return run_ranks(_on_rank, course.ranks, course, backend=backend, timeout=limit)[0]
    finally:
        Console().show_cursor()  # rank 0 may have ended while its bar was live


def alone(course: Course) -> Run:
    """Train in this process, on one thread: matrices this small are slower on more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with watching("one process", course.steps) as watch:
            return by_one_process(course, watch)
    finally:
        torch.set_num_threads(threads)


def _on_rank(course: Course) -> Run:
    """Rank 0 shows how far all are, on the terminal that it shares with whoever started it."""
    if rank_of() != 0:
        return by_ranks(course, lambda step, loss, accuracy: None)  # noqa: ARG005
    with watching(f"{course.who:<11}", course.steps) as watch:
        return by_ranks(course, watch)
