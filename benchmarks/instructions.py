"""Machine instructions of small calls, counted by callgrind: shows a regression without a clock.

    python benchmarks/instructions.py [--calls 100]

Needs valgrind. The world has two ranks, of which only this one exists: torch's "fake" backend sends
nothing and completes at once, so that the count is the work of this rank, in Python and below,
without waiting. The algorithms are those of a backend with its own collectives, such as NCCL.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.nn import functional as nn

import allgrad as ag
from allgrad._core.torch_internals import functional_collectives
from allgrad._wire import recording

if TYPE_CHECKING:
    from collections.abc import Callable


RECORDED = "allgrad all_reduce, recorded"


def implementations() -> dict[str, Callable[[], object]]:
    x, g = torch.ones(2, requires_grad=True), torch.ones(2)
    functional = functional_collectives()

    def raw() -> torch.Tensor:
        out = g.clone()
        dist.all_reduce(out)
        return out

    def with_backward(call: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(call(x), x, g)

    return {
        "nothing": lambda: None,
        "raw all_reduce": raw,
        "allgrad all_reduce": lambda: ag.all_reduce(x),
        "allgrad all_reduce, no gradient": lambda: ag.all_reduce(g, grad="none"),
        "allgrad all_gather, equal": lambda: ag.all_gather(x, sizes="equal"),
        RECORDED: lambda: ag.all_reduce(x),
        "nn all_reduce": lambda: nn.all_reduce(x),
        "functional all_reduce": lambda: functional.all_reduce(x, "sum", dist.group.WORLD).wait(),
        "allgrad all_reduce, forward and backward": with_backward(ag.all_reduce),
        "nn all_reduce, forward and backward": with_backward(nn.all_reduce),
        "allgrad all_to_all, forward and backward": with_backward(
            partial(ag.all_to_all, send_sizes="equal")
        ),
        "nn all_to_all, forward and backward": with_backward(
            lambda x: nn.all_to_all_single(torch.empty_like(x), x)
        ),
    }


def control(*words: str) -> None:
    command = ["callgrind_control", *words, str(os.getpid())]
    subprocess.run(command, check=True, capture_output=True)  # noqa: S603


def inside(calls: int) -> None:
    """Under valgrind: count each implementation, after a warm-up."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    made = implementations()
    recorder = recording.Recorder(Path(tempfile.mkdtemp()), calls=1 << 12)
    for name, implementation in made.items():
        recording._switch(recorder if name == RECORDED else None)
        for _ in range(20):
            implementation()
    control("--instr=on")
    for name, implementation in made.items():
        recording._switch(recorder if name == RECORDED else None)
        control("--zero")
        for _ in range(calls):
            implementation()
        control(f"--dump={name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        inside(options.calls)
        return
    with tempfile.TemporaryDirectory() as folder:
        valgrind = ("valgrind", "--tool=callgrind", "--instr-atstart=no")
        out = f"--callgrind-out-file={folder}/out"
        program = (sys.executable, __file__, "--inside", f"--calls={options.calls}")
        settings = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        subprocess.run([*valgrind, "-q", out, *program], env=settings, check=True)  # noqa: S603
        counts = [
            int(found[1])
            for number in range(1, len(implementations()) + 1)
            if (
                found := re.search(
                    r"^(?:totals|summary): (\d+)", dump(folder, number), re.MULTILINE
                )
            )
        ]
    for name, count in zip(implementations(), counts, strict=True):
        each = (count - counts[0]) / options.calls
        print(f"{name:<34} {each / 1000:8.1f} thousand instructions")


def dump(folder: str, number: int) -> str:
    return (Path(folder) / f"out.{number}").read_text()


if __name__ == "__main__":
    main()
