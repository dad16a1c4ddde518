"""The types that a user's editor shows: right code passes mypy and pyright, mistakes do not."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "typing"
ROOT = Path(__file__).parent.parent


ACCEPTED, REJECTED = HERE / "accepted.py", HERE / "rejected.py"


def mypy():
    """The lines of each file that mypy rejects."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--no-error-summary",
            str(ACCEPTED),
            str(REJECTED),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    found = re.findall(r"^(\S+):(\d+): error: ", done.stdout, re.MULTILINE)
    assert found, done.stdout + done.stderr
    return {(Path(file).name, int(line)) for file, line in found}


def pyright():
    """The same for pyright."""
    options = ["--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(
        [sys.executable, "-m", "pyright", *options, str(ACCEPTED), str(REJECTED)],
        cwd=HERE,
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    return {
        (Path(one["file"]).name, one["range"]["start"]["line"] + 1)
        for one in json.loads(done.stdout)["generalDiagnostics"]
        if one["severity"] == "error"
    }


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_right_code_is_accepted_and_mistakes_are_rejected(checker):
    pytest.importorskip(checker.__name__)
    lines = enumerate(REJECTED.read_text().splitlines(), 1)
    assert checker() == {(REJECTED.name, n) for n, line in lines if "# wrong:" in line}
