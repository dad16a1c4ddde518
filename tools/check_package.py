"""Build the wheel and the sdist, install each in an empty environment, and use what was installed.

    python -m pip install build && python tools/check_package.py
    python tools/check_package.py --out dist --version 0.2.0      # keep them; their version must be this

Each environment is new, and is given the package alone: torch and the rest come as its
dependencies. Then a world of two ranks is started from a folder without the sources.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEEDED = (
    "allgrad/py.typed",
    "allgrad/cli/demo/digits.npz",
    *(f"allgrad/report/assets/page.{kind}" for kind in ("html", "css", "js")),
)

USE = """
import torch, allgrad as ag, allgrad.losses, allgrad.nn, allgrad.devices, allgrad.module_state, allgrad.compat
x = torch.ones(2, requires_grad=True)
ag.all_gather(x).sum().backward()
assert x.grad.tolist() == [1, 1]
print("allgrad", ag.__version__, "from", ag.__file__, "with torch", torch.__version__)
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="keep the wheel and the sdist in this folder")
    parser.add_argument("--version", help="fail unless this is their version")
    parser.add_argument("--extras", default="cli,testing", help="installed after the plain package")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = given.out or Path(folder) / "dist"
        _run([sys.executable, "-m", "build", "--outdir", str(out), str(ROOT)])
        (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
        _check_contents(wheel, sdist, given.version)
        for package in (wheel, sdist):
            _use(package, Path(folder) / f"env-{package.suffix[1:]}", given.extras)
    print("The wheel and the sdist install and work.")


def _check_contents(wheel: Path, sdist: Path, version: str | None) -> None:
    """The files that no import would miss, and the version."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    missing = [name for name in NEEDED if name not in names]
    strays = [name for name in names if not name.startswith("allgrad")]
    if missing or strays:
        sys.exit(f"{wheel.name}: without {missing}, with {strays}")
    with tarfile.open(sdist) as source:
        inside = [name.partition("/")[2] for name in source.getnames()]
    missing = [name for name in (*NEEDED, "LICENSE") if not {name, f"src/{name}"} & set(inside)]
    if missing:
        sys.exit(f"{sdist.name}: without {missing}")
    if version is not None and f"allgrad-{version}-" not in wheel.name:
        sys.exit(f"{wheel.name} is not version {version}: change src/allgrad/_core/version.py")


def _use(package: Path, env: Path, extras: str) -> None:
    """Install into a new environment and run the library, then its command."""
    _run([sys.executable, "-m", "venv", str(env)])
    python = str(env / "bin" / "python")
    _run([python, "-m", "pip", "install", "--quiet", str(package)])
    _run([python, "-c", USE], cwd=env)
    _run([python, "-m", "pip", "install", "--quiet", f"{package}[{extras}]"])
    _run([str(env / "bin" / "allgrad"), "doctor"], cwd=env)


def _run(command: list[str], cwd: Path | None = None) -> None:
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    print("$", " ".join(command)[:160].strip().replace("\n", " "), flush=True)
    if subprocess.run(command, cwd=cwd, env=plain, check=False).returncode:
        sys.exit(f"failed: {command[0]}")


if __name__ == "__main__":
    main()
