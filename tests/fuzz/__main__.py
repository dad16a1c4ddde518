"""The fuzzer as a command.

python tests/fuzz --minutes 30          random programs until the time is up
python tests/fuzz --programs 5000       that many
python tests/fuzz --seed 17             one program: print it, run it, minimise it if it goes wrong
python tests/fuzz --faults --minutes 5  programs in which a rank raises, exits, is stopped or is late
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from fuzz import faults
from fuzz.coverage import Coverage, describe
from fuzz.generate import generate
from fuzz.minimise import minimise
from fuzz.ranks import Find, check

BATCH = 100


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=None)
    parser.add_argument("--programs", type=int, default=None)
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--compiled", action="store_true", help="compile blocks on some ranks")
    parser.add_argument("--faults", action="store_true")
    given = parser.parse_args()
    if given.faults:
        return faults.hunt(given.minutes, given.programs, given.start, given.seed)
    if given.seed is not None:
        program = generate(given.seed, compiled=given.compiled)
        write(describe(program))
        found = list(check([program]))
        report(found)
        return len(found)
    return hunt(given)


def hunt(given: argparse.Namespace) -> int:
    """Run program after program; print each find as a short program, and what was covered."""
    coverage, began, finds = Coverage(), time.monotonic(), 0
    minutes = given.minutes if given.minutes or given.programs else 1.0
    seeds = range(given.start, given.start + (given.programs or sys.maxsize))
    for first in range(seeds.start, seeds.stop, 4 * BATCH):
        if minutes and time.monotonic() - began > 60 * minutes:
            break
        by_world = defaultdict(list)
        for seed in range(first, min(first + 4 * BATCH, seeds.stop)):
            program = generate(seed, compiled=given.compiled)
            by_world[program.world].append(program)
            coverage.add(program)
        for _, programs in sorted(by_world.items()):
            for i in range(0, len(programs), BATCH):
                found = list(check(programs[i : i + BATCH]))
                finds += len(found)
                report(found)
        seconds = time.monotonic() - began
        write(f"{coverage.programs} programs in {seconds:.0f} s, {finds} went wrong")
    write(coverage.table())
    return min(finds, 1)


def report(found: list[Find]) -> None:
    for find in found:
        short = minimise(find)
        write(describe(short.program, short.how))


def write(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
