"""Run the suite on several versions of torch, each in its own environment, and print a table.

    python tools/versions.py --envs ~/envs                      # all of VERSIONS
    python tools/versions.py --envs ~/envs 2.11.0 2.15.0 --pytest "tests/compat -k broadcast"

An environment is a folder ``torch-<version>`` in ``--envs``. One that is there is used again; one
that is not is made, which with a CUDA build of torch takes about 3 minutes and 5 GB. pytest's
output goes to ``torch-<version>.log`` beside it.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

VERSIONS = ["2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0"]
ROOT = Path(__file__).resolve().parent.parent
COLUMNS = ["torch", "Python", "passed", "failed", "skipped", "minutes"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("versions", nargs="*", default=VERSIONS, help="versions of torch")
    parser.add_argument("--envs", type=Path, required=True, help="the folder of the environments")
    parser.add_argument("--python", default=sys.executable, help="Python of a new environment")
    parser.add_argument("--pytest", default="", help="more arguments of pytest, in one string")
    given = parser.parse_args()

    given.envs.mkdir(parents=True, exist_ok=True)
    _print_row(COLUMNS)
    _print_row(["---"] * len(COLUMNS))
    failed = False
    for version in given.versions:
        python = _environment(given.envs / f"torch-{version}", version, given.python)
        log = given.envs / f"torch-{version}.log"
        row, passes = _run_suite(python, log, shlex.split(given.pytest))
        _print_row([version, *row])
        failed |= not passes
    sys.exit(failed)


def _environment(folder: Path, version: str, python: str) -> Path:
    """Make the environment unless it is there, and install this checkout into it."""
    own = folder.absolute() / "bin" / "python"
    if not own.exists():
        subprocess.run([python, "-m", "venv", folder], check=True)
    # torch is named beside the rest, so that nothing pulls another version of it.
    packages = [f"torch=={version}", "--editable", f"{ROOT}[dev]"]
    subprocess.run([own, "-m", "pip", "install", "--quiet", *packages], check=True)
    return own


def _run_suite(python: Path, log: Path, more: list[str]) -> tuple[list[str], bool]:
    """The row's cells after the version, and whether every test passed."""
    pytest = [python, "-m", "pytest", "--numprocesses", "2", "--dist", "worksteal", *more]
    began = time.monotonic()
    with log.open("w") as file:
        done = subprocess.run(pytest, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, check=False)
    minutes = (time.monotonic() - began) / 60
    last_line = (log.read_text().splitlines() or [""])[-1]
    counts = {
        kind: int(n) for n, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", last_line)
    }
    failures = counts.get("failed", 0) + counts.get("error", 0)
    shown = [counts.get("passed", 0), failures, counts.get("skipped", 0)] if counts else ["-"] * 3
    show_python = [python, "-c", "import platform; print(platform.python_version())"]
    asked = subprocess.run(show_python, capture_output=True, text=True, check=True)
    return [asked.stdout.strip(), *map(str, shown), f"{minutes:.1f}"], done.returncode == 0


def _print_row(cells: list[str]) -> None:
    print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
