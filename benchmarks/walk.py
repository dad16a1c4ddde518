"""The walk of one call through the source: which files it passes, and how often it jumps.

A jump is a call from a function in one file of allgrad to a function in another, as a reader
follows it. Counted for the second call of its kind, on a group of four ranks made by torch's fake
backend, which sends nothing.

    python benchmarks/walk.py [--show]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import allgrad as ag

HOME = str(Path(ag.__file__).parent)


class Walk:
    """Records every call that enters a file of allgrad from another one."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self.jumps: list[tuple[str, str]] = []

    def __enter__(self) -> Walk:  # noqa: PYI034
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _event(self, frame: object, event: str, _: object) -> None:
        if event != "call":
            return
        code = frame.f_code
        if not code.co_filename.startswith(HOME):
            return
        file = code.co_filename.removeprefix(HOME + "/")
        if file not in self.files:
            self.files.append(file)
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(HOME):
            caller = caller.f_back
        before = "" if caller is None else caller.f_code.co_filename.removeprefix(HOME + "/")
        if before and before != file:
            self.jumps.append((before, f"{file}:{code.co_name}"))


def walks() -> dict[str, Walk]:
    """The walks of ``all_gather`` forward, sizes found out and promised equal, and backward."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    found: dict[str, Walk] = {}
    try:
        for name, sizes in (("found out", None), ("equal", "equal")):
            x = torch.randn(8, 4, requires_grad=True)
            ag.all_gather(x, sizes=sizes).sum().backward()
            with Walk() as found[f"forward, sizes {name}"]:
                y = ag.all_gather(x, sizes=sizes)
            with Walk() as found[f"backward, sizes {name}"]:
                y.sum().backward()
    finally:
        dist.destroy_process_group()
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--show", action="store_true", help="list every jump")
    show = options.parse_args().show
    print("| all_gather | files | jumps |")
    print("|---|---|---|")
    for name, walk in walks().items():
        print(f"| {name} | {len(walk.files)} | {len(walk.jumps)} |")
        if show:
            print("\n".join(f"    {a} -> {b}" for a, b in walk.jumps))


if __name__ == "__main__":
    main()
