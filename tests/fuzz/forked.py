"""Ranks as forks of one process that has imported torch: a world in milliseconds, for programs that end processes."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from allgrad._wire.world import Rendezvous, World

if TYPE_CHECKING:
    from collections.abc import Callable

PRELOADED = [
    "torch._dynamo",
    "torch._inductor.pattern_matcher",
    "allgrad._autograd.graph_ops",
    "fuzz.faults",
]


class ForkedRanks:
    """Starts worlds whose ranks write down how they ended, and may then be gone."""

    def __init__(self) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._rendezvous = Rendezvous()
        self._worlds = 0

    def run(
        self, function: Callable[..., dict], world: int, args: tuple, seconds: float
    ) -> dict[int, dict]:
        """How each rank ended, as far as it could tell; a rank that still runs is killed."""
        self._worlds += 1
        with tempfile.TemporaryDirectory() as folder:
            place = (world, self._rendezvous.port, f"faults {self._worlds}", folder, seconds)
            ranks = [
                self._context.Process(target=_rank, args=(rank, place, function, args))
                for rank in range(world)
            ]
            for rank in ranks:
                rank.start()
            # Each counts its seconds from where all have met; meeting takes its time on a busy machine.
            until = time.monotonic() + 60 + seconds
            for rank in ranks:
                rank.join(max(0.0, until - time.monotonic()))
                rank.kill()
                rank.join()
            return {rank: _read(Path(folder), rank) for rank in range(world)}


def _rank(rank: int, place: tuple, function: Callable[..., dict], args: tuple) -> None:
    world, port, name, folder, seconds = place
    torch.set_num_threads(1)
    World.start(rank, world, backend="gloo", port=port, name=name)
    with Path(folder, f"{rank}.stack").open("w") as stack:
        torch.distributed.barrier()
        faulthandler.dump_traceback_later(seconds, exit=True, file=stack)
        ended = function(*args)
        part = Path(folder, f"{rank}.part")
        torch.save(ended, part)
        part.rename(part.with_suffix(".end"))
        os._exit(0)  # as a program does after an error; its connections close


def _read(folder: Path, rank: int) -> dict:
    file = folder / f"{rank}.end"
    if file.exists():
        return torch.load(file, weights_only=True)
    stack = folder / f"{rank}.stack"
    where = stack.read_text() if stack.exists() else "before the program"
    how = "still running" if where else "gone"
    return {"error": how, "text": where, "found": {}, "seconds": float("nan")}
