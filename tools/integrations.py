"""Install every library that allgrad.integrations knows, run its tests, and print what each gets wrong.

    python tools/integrations.py --envs ~/envs

Two environments: ``integrations``, and ``integrations-pylate``, since pylate needs other versions of
sentence-transformers. One that is there is used again; one that is not is made, in about 10 minutes
and 8 GB with a CUDA build of torch. The table is that of docs/integrations.md.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
# In each environment: the extra, and the modules of ours (with the distribution) tested there.
ENVIRONMENTS = {
    "integrations": {
        "accelerate": "accelerate",
        "colpali": "colpali-engine",
        "lightly": "lightly",
        "lightning": "lightning",
        "open_clip": "open_clip_torch",
        "pytorch_metric_learning": "pytorch-metric-learning",
        "sentence_transformers": "sentence-transformers",
        "torchmetrics": "torchmetrics",
    },
    "integrations-pylate": {"pylate": "pylate"},
}
COLUMNS = ["library", "what", "theirs, equal", "theirs, unequal", "ours, equal", "ours, unequal"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--envs", type=Path, help="the folder of the environments")
    # ===: a local build such as 2.13.0+cpu has no torchvision that fits it on PyPI.
    parser.add_argument("--torch", default="torch===2.13.0", help="the requirement of torch")
    parser.add_argument("--python", default=sys.executable, help="Python of a new environment")
    parser.add_argument(
        "--patience", type=float, default=10.0, help="multiplies the time limits of the tests"
    )
    parser.add_argument("--table", nargs="*", help="print the rows of these, in this environment")
    given = parser.parse_args()
    if given.table is not None:
        _print_rows(given.table)
        return
    if given.envs is None:
        parser.error("--envs is needed")

    # One library after another, with time to spare: a limit that is hit says nothing of it.
    settings = {**os.environ, "ALLGRAD_PATIENCE": str(given.patience)}
    limit = f"--timeout={120 * given.patience}"
    rows, runs = [], {}
    for name, libraries in ENVIRONMENTS.items():
        extra = name.removeprefix("integrations-")
        python = _environment(given.envs / name, extra, given.torch, given.python)
        pytest = [python, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", limit]
        for library in libraries:
            table = [python, __file__, "--table", library]
            runs[f"table of {library}"] = subprocess.run(
                table, check=False, env=settings, stdout=subprocess.PIPE, text=True
            )
            # Libraries print on their own.
            printed = runs[f"table of {library}"].stdout.splitlines()
            rows += [line for line in printed if line.startswith("| ")]
            tests = TESTS / "integrations" / f"test_{library}.py"
            runs[f"tests of {library}"] = _tested([*pytest, tests], settings)
        # The versions that pylate needs do not run the examples of other libraries.
        own = [] if extra == "integrations" else ["-k", extra]
        runs[f"examples, {name}"] = _tested([*pytest, *own, TESTS / "test_examples.py"], settings)

    _print_row(COLUMNS)
    _print_row(["---"] * len(COLUMNS))
    print("\n".join(rows))
    for what, run in runs.items():
        last = run.stdout.strip().splitlines()[-1:] if not what.startswith("table") else []
        print(f"{what}: exit {run.returncode}", *last)
    sys.exit(int(any(run.returncode for run in runs.values())))


def _tested(
    command: list[str | Path], settings: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    run = subprocess.run(
        command, check=False, env=settings, cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    print(run.stdout, file=sys.stderr, flush=True)
    return run


def _environment(folder: Path, extra: str, torch: str, python: str) -> Path:
    """Make the environment unless it is there, and install this checkout and the libraries into it."""
    own = folder.absolute() / "bin" / "python"
    if not own.exists():
        subprocess.run([python, "-m", "venv", folder], check=True)
    constraints = folder / "constraints.txt"
    constraints.write_text(f"{torch}\n")
    install = [own, "-m", "pip", "install", "--quiet", "--constraint", constraints]
    # torch first: with it in place nothing else pulls another build of it.
    subprocess.run([*install, torch], check=True)
    subprocess.run([*install, "--editable", f"{ROOT}[dev,{extra}]"], check=True)
    return own


def _print_rows(libraries: list[str]) -> None:
    sys.path[0] = str(TESTS)  # in place of this folder, where this file is also named integrations
    os.chdir(ROOT)
    for library in libraries:
        module = __import__(f"integrations.test_{library}", fromlist=["COMPARISONS"])
        distribution = dict(pair for made in ENVIRONMENTS.values() for pair in made.items())[
            library
        ]
        for what, comparison in module.COMPARISONS.items():
            cells = [
                comparison.describe(way, rows) if getattr(comparison, way) else "-"
                for way in ("theirs", "ours")
                for rows in ((2, 2), (3, 1))
            ]
            _print_row([f"{distribution} {version(distribution)}", what, *cells])


def _print_row(cells: list[str]) -> None:
    print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
