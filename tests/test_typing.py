"""The types that a user's editor shows: right code passes mypy and pyright, mistakes do not."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "typing"
ROOT = Path(__file__).parent.parent


def mypy(file):
    """The lines of a file that mypy rejects, with what it says."""
    options = ["--strict", "--no-error-summary", "--hide-error-context", "--no-incremental"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "--follow-imports=silent", str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    found = re.findall(r"^\S*" + file.name + r":(\d+): error: (.*)$", done.stdout, re.MULTILINE)
    assert found or done.returncode == 0, done.stdout + done.stderr
    return {int(line): text for line, text in found}


def pyright(file):
    """The same for pyright."""
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, str(file)],
        cwd=HERE,
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    told = json.loads(done.stdout)["generalDiagnostics"]
    return {
        one["range"]["start"]["line"] + 1: one["message"]
        for one in told
        if one["severity"] == "error" and one["file"] == str(file)
    }


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_right_code_is_accepted(checker):
    pytest.importorskip(checker.__name__)
    assert checker(HERE / "accepted.py") == {}


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_mistakes_are_rejected(checker):
    pytest.importorskip(checker.__name__)
    file = HERE / "rejected.py"
    marked = [n for n, line in enumerate(file.read_text().splitlines(), 1) if "# wrong:" in line]
    assert sorted(checker(file)) == marked
