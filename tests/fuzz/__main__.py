"""The fuzzer as a command.

python tests/fuzz --minutes 30          random programs until the time is up, and at most 20 s longer
python tests/fuzz --programs 5000       that many
python tests/fuzz --seed 17             one program: print it, run it, minimise it if it goes wrong
python tests/fuzz --compiled ...        programs with blocks that are compiled on some ranks
python tests/fuzz --transforms ...      programs inside of torch.func, or with dual numbers
python tests/fuzz --faults ...          programs in which a rank raises, exits, is stopped or is late
python tests/fuzz --workers 7 ...       in so many processes, each with ranks of its own
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from fuzz.batches import Mode, run_batch
from fuzz.coverage import describe
from fuzz.fleet import Hunt, run_fleet, run_here, serve


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=None)
    parser.add_argument("--programs", type=int, default=None)
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--compiled", action="store_true", help="compile blocks on some ranks")
    parser.add_argument("--transforms", action="store_true", help="differentiate by torch.func")
    parser.add_argument("--faults", action="store_true", help="one rank does not do its part")
    parser.add_argument("--workers", type=int, default=1, help="processes that run programs")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    mode = Mode(given.faults, given.compiled, given.transforms)
    if given.serve:
        serve(mode)
        return 0
    if given.seed is not None:
        write(describe(mode.program(given.seed)))
        finds = run_batch(mode, range(given.seed, given.seed + 1)).finds
        write("\n".join(finds) or "as it should be")
        return min(len(finds), 1)
    minutes = given.minutes if given.minutes or given.programs else 1.0
    seeds = range(given.start, given.start + (given.programs or sys.maxsize))
    hunt = Hunt(mode, seeds, minutes, write)
    if given.workers > 1:
        run_fleet(hunt, given.workers)
    else:
        run_here(hunt)
    write(hunt.coverage.table())
    write(hunt.counts())
    return min(hunt.finds, 1)


def write(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
