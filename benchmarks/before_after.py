"""The rows of ``allgrad bench`` by this code and by an earlier commit, in one interleaved run.

    python benchmarks/before_after.py COMMIT [--ranks 4] [--sizes 4KiB,256KiB,4MiB,64MiB]

The earlier code is loaded under another name, ``allgrad_before``, by the same ranks: both take turns
sample by sample, so that whatever else the machine does falls on both. Instead of a commit, a folder
that holds the earlier ``src/allgrad``. Ends with 1 if a row is slower than before by more than 5 %.
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allgrad.cli.bench import measure
from allgrad.cli.bench.baselines import Implementation, implementations_of
from allgrad.cli.bench.cases import OPERATIONS, Case
from allgrad.cli.bench.command import choose
from allgrad.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[1]
BEFORE = "allgrad_before"
LIMIT = 1.05
LONGEST = 600.0


def load_earlier(earlier: str, into: Path) -> None:
    """Put the earlier package into a folder, under its other name."""
    if Path(earlier).is_dir():
        shutil.copytree(Path(earlier, "src", "allgrad"), into / BEFORE)
    else:
        archive = ["git", "archive", earlier, "src/allgrad"]
        found = subprocess.run(archive, check=True, capture_output=True, cwd=ROOT)  # noqa: S603
        with tarfile.open(fileobj=io.BytesIO(found.stdout)) as packed:
            packed.extractall(into, filter="data")
        (into / "src" / "allgrad").rename(into / BEFORE)
    for module in (into / BEFORE).rglob("*.py"):
        module.write_text(re.sub(r"\ballgrad\b", BEFORE, module.read_text()))


def measure_both(case: Case, repeats: int, calls: int, folder: str) -> dict[str, measure.Times]:
    """On one rank: the bench's own measurement, with the earlier code as one more implementation."""
    sys.path.insert(0, folder)
    before: Any = import_module(BEFORE)

    def both(case: Case, rank: int, *_: Any, **__: Any) -> dict[str, Implementation]:
        found = implementations_of(case, rank)
        kept = {name: one for name, one in found.items() if name.startswith("allgrad")}
        return kept | {f"before: {name}": _earlier(before, case, name) for name in kept}

    measure.implementations_of = both
    return measure.measure_time(case, repeats, calls)


def _earlier(before: Any, case: Case, name: str) -> Implementation:
    """The same call of the earlier package."""
    if case.tensors > 1:
        if name.endswith("nest"):
            return Implementation(before.all_reduce)
        return Implementation(lambda xs: [before.all_reduce(x) for x in xs])
    named: dict[str, Any] = {}
    if case.operation == "all_to_all":
        named = {"send_sizes": "equal"}
    elif case.operation in {"all_gather", "reduce_scatter"} and not case.skewed:
        named = {"sizes": "equal"}
    elif name.endswith("given") or case.operation == "reduce_scatter":
        named = {"sizes": case.rows}
    call = getattr(before, case.operation)
    return Implementation(lambda xs: [call(xs[0], **named)])


def slowest(ranks: Sequence[measure.Times], part: str) -> float:
    """The median over samples, each of the rank that took longest, in seconds."""
    return statistics.median(map(max, zip(*(getattr(one, part) for one in ranks), strict=True)))


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("earlier", help="a commit, or a folder with the earlier src/allgrad")
    asked.add_argument("--ranks", default="4")
    asked.add_argument("--sizes", default="4KiB,256KiB,4MiB,64MiB")
    asked.add_argument("--only", default=",".join(OPERATIONS))
    asked.add_argument("--scale", type=float, default=1.0, help="more or fewer samples")
    options = asked.parse_args()
    slower = 0
    print(
        f"{'row':44} {'forward':>22} {'forward + backward':>24}   ms before, now, ratio", flush=True
    )
    with tempfile.TemporaryDirectory() as folder:
        load_earlier(options.earlier, Path(folder))
        for case in choose(options.ranks, options.sizes, options.only):
            nbytes = case.nbytes * case.tensors
            calls = 100 if nbytes <= 64 else 10 if nbytes <= 2**18 else 1
            repeats = round(
                options.scale * (61 if nbytes <= 4096 else 41 if nbytes <= 2**23 else 11)
            )
            ranks = run_ranks(
                measure_both, case.world, case, repeats, calls, folder, timeout=LONGEST
            )
            for name in (name for name in ranks[0] if not name.startswith("before")):
                cells = []
                for part in ("forward", "both"):
                    now = 1e3 * slowest([rank[name] for rank in ranks], part)
                    then = 1e3 * slowest([rank[f"before: {name}"] for rank in ranks], part)
                    cells.append(f"{then:8.3f} {now:8.3f} {now / then:5.2f}")
                slower += now > LIMIT * then
                row = f"{case.title}, {case.nbytes} B{name.removeprefix('allgrad')}"
                print(
                    f"{row:44} {cells[0]}  {cells[1]}{'  <' if now > LIMIT * then else ''}",
                    flush=True,
                )
    print(f"{slower} rows slower than before by more than 5 %, forward and backward")
    return int(slower > 0)


if __name__ == "__main__":
    sys.exit(main())
