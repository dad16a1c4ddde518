"""Places of src/ broken by hand, and whether the suite's share of the fuzzer notices each.

python tests/fuzz/mutations.py          all of them, in copies of the tree
python tests/fuzz/mutations.py 3 7      some, by number
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent

# What is wrong, the file below src/allgrad, the text before and after.
MUTATIONS = (
    (
        "a sign",
        "_wire/point_to_point.py",
        "torch.add(x, total, out=total)",
        "torch.sub(x, total, out=total)",
    ),
    (
        "a slice",
        "_core/partition.py",
        "x.narrow(dim, sum(sizes[:rank]), sizes[rank])",
        "x.narrow(dim, 0, sizes[rank])",
    ),
    (
        "an order",
        "_core/partition.py",
        "return [torch.cat(blocks[i :: len(xs)], dim)",
        "return [torch.cat(blocks[i :: len(xs)][::-1], dim)",
    ),
    (
        "a missing wait",
        "_wire/pairwise.py",
        "    blocks[call.rank].copy_(pieces[call.rank])\n    wait(call, alike, works)\n",
        "    blocks[call.rank].copy_(pieces[call.rank])\n",
    ),
    (
        "a wrong peer",
        "collectives/permute.py",
        "lambda xs: move(xs, source, end, after, partition)",
        "lambda xs: move(xs, end, source, partition, after)",
    ),
    (
        "a dropped scale",
        "collectives/all_reduce.py",
        "return [x / divided_by for x in xs]",
        "return list(xs)",
    ),
    (
        "a wrong dim",
        "collectives/all_gather.py",
        "reduction.stacked(x.unflatten(dim, (call.size, size)), dim)",
        "reduction.stacked(x.unflatten(dim, (size, call.size)), dim + 1)",
    ),
    (
        "a stale cache key",
        "collectives/all_reduce.py",
        'key = ("all_reduce", x, group, op, grad)',
        'key = ("all_reduce", x, group, op)',
    ),
    (
        "a wrong tie rule",
        "_core/reductions.py",
        "lambda t, d: t.amax(d)",
        "lambda t, d: t.max(d).values",
    ),
    (
        "a missing contiguous",
        "_wire/primitives.py",
        "        x = x.contiguous()\n",
        "        pass\n",
    ),
    (
        "an order of backward",
        "_autograd/async_calls.py",
        "                started_calls.finish(group, before=handle)\n",
        "",
    ),
    (
        "an order of plain and async calls",
        "_autograd/transforms.py",
        "        started_calls.finish(pair.call.group)\n",
        "        pass\n",
    ),
    (
        "a token that is not handed on",
        "_autograd/backward_order.py",
        "self._last, *results = node(self._last)",
        "self._last, *results = node(self._first)",
    ),
    (
        "a wrong tangent",
        "_autograd/transforms.py",
        "return tuple(_apply_to_batch(ctx.pair, tangents))",
        "return tuple(2 * t for t in _apply_to_batch(ctx.pair, tangents))",
    ),
    (
        "a batch in a wrong place",
        "_autograd/transforms.py",
        "else x.movedim(dim, -1)",
        "else x.movedim(dim, -1).flip(-1)",
    ),
)


def caught(number: int) -> bool:
    """Break one place in a copy, and run the share there until it finds something."""
    what, file, before, after = MUTATIONS[number]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for part in ("src", "tests"):
            shutil.copytree(ROOT / part, Path(folder, part))
        place = Path(folder, "src", "allgrad", file)
        text = place.read_text()
        if text.count(before) != 1:
            sys.stdout.write(f"{number:>2} {what}: {file} has changed; bring the list up to date\n")
            return False
        place.write_text(text.replace(before, after))
        paths = os.pathsep.join([str(Path(folder, "src")), str(Path(folder, "tests"))])
        command = [sys.executable, "-c", "from fuzz import mutations; mutations.run_share()"]
        environment = {**os.environ, "PYTHONPATH": paths}
        ran = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
    how = (ran.stdout + ran.stderr).strip().splitlines()[:1]
    found = "caught" if ran.returncode else "missed"
    seconds = time.monotonic() - began
    sys.stdout.write(f"{number:>2} {found} in {seconds:.0f} s: {what} ({file}) {''.join(how)}\n")
    sys.stdout.flush()
    return ran.returncode != 0


def run_share() -> None:
    """The programs that the suite runs, up to the first find."""
    from fuzz.ranks import check
    from fuzz.test_fuzz import TRANSFORMED, programs_of

    for world in (2, 3, 4, 1):
        transformed = programs_of(world, TRANSFORMED, transforms=True)
        for find in itertools.chain(check(programs_of(world)), check(transformed)):
            sys.exit(f"seed {find.program.seed}: {find.how}")


def main() -> int:
    numbers = [int(given) for given in sys.argv[1:]] or list(range(len(MUTATIONS)))
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4)) as several:
        found = list(several.map(caught, numbers))
    sys.stdout.write(f"{sum(found)} of {len(found)} caught\n")
    return int(not all(found))


if __name__ == "__main__":
    sys.exit(main())
