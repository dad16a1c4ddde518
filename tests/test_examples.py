"""The examples in examples/ run on two ranks, where their library is installed."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from allgrad.testing.pool import PATIENCE

FOLDER = Path(__file__).parent.parent / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))


def missing(path):
    text = path.read_text()
    names = re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE)
    adapted = re.findall(r"^from allgrad\.integrations\.(\w+)", text, re.MULTILINE)
    names += ["colpali_engine" if name == "colpali" else name for name in adapted]
    return [name for name in dict.fromkeys(names) if importlib.util.find_spec(name) is None]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs_on_two_ranks(path):
    if names := missing(path):
        pytest.skip(f"{', '.join(names)} is not installed")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    limit = 100 * PATIENCE
    done = subprocess.run(
        [*launcher, path], capture_output=True, text=True, timeout=limit, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("the parameters are those of one process") == 2


def test_examples_are_short():
    assert len(EXAMPLES) >= 11
    long = [path.name for path in EXAMPLES if len(path.read_text().splitlines()) > 60]
    assert not long
