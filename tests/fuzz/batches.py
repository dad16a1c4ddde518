"""Batches of seeds: what a program run on ranks is called, how many go together, and what came out."""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fuzz import faults
from fuzz.coverage import describe, features
from fuzz.generate import generate
from fuzz.minimise import minimise
from fuzz.ranks import check

if TYPE_CHECKING:
    from fuzz.program import Program

TOGETHER = 100  # programs in one call of the ranks


@dataclass(frozen=True)
class Mode:
    """What is run: programs, or programs with a fault; with compiled blocks, or inside of transforms."""

    faults: bool = False
    compiled: bool = False
    transforms: bool = False

    @property
    def batch(self) -> int:
        """How many seeds go to a worker at a time: seconds of work, so that a hunt can stop in time."""
        return 1 if self.faults else 8 if self.compiled else 200

    @property
    def options(self) -> list[str]:
        return (
            ["--faults"] * self.faults
            + ["--compiled"] * self.compiled
            + ["--transforms"] * self.transforms
        )

    def program(self, seed: int) -> Program:
        if self.faults:
            return faults.faulty(seed, compiled=self.compiled)[0]
        return generate(seed, compiled=self.compiled, transforms=self.transforms)


@dataclass
class Outcome:
    """What came out of a batch: the features of each program, and the programs that went wrong."""

    features: list[list[str]] = field(default_factory=list)
    finds: list[str] = field(default_factory=list)


def run_batch(mode: Mode, seeds: range) -> Outcome:
    """Run the programs of some seeds; each find as a short program."""
    programs = [mode.program(seed) for seed in seeds]
    outcome = Outcome([sorted(features(program)) for program in programs])
    if mode.faults:
        found = (faults.check_fault(seed, compiled=mode.compiled) for seed in seeds)
        outcome.finds += filter(None, found)
        return outcome
    by_world = defaultdict(list)
    for program in programs:
        by_world[program.world].append(program)
    for _, of_world in sorted(by_world.items()):
        for i in range(0, len(of_world), TOGETHER):
            for find in check(of_world[i : i + TOGETHER]):
                # At once: to find a shorter program takes minutes, and may be cut.
                sys.stderr.write(f"seed {find.program.seed} went wrong: {find.how}\n")
                short = minimise(find)
                outcome.finds.append(describe(short.program, short.how))
    return outcome
