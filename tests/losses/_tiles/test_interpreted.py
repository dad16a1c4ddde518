"""Every Triton kernel, and ranks on them, without a device: what the two other files say."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[2]


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
@pytest.mark.skipif(
    torch.cuda.is_available(), reason="test_triton.py runs the kernels on the device"
)
@pytest.mark.parametrize(
    ("file", "some"),
    [
        ("interpreted_kernels.py", "softmax"),
        ("interpreted_kernels.py", "sigmoid_tiles"),
        ("interpreted_kernels.py", "one_rank and clip"),
        ("interpreted_kernels.py", "one_rank and not clip"),
        ("interpreted_kernels.py", "not (softmax or sigmoid_tiles or one_rank)"),
        ("interpreted_ranks.py", ""),
    ],
)
def test_kernels_equal_the_formulas_in_tritons_interpreter(file, some):
    options = "-q", "--no-header", "--tb=short", "-k", some
    command = sys.executable, "-m", "pytest", *options, Path(__file__).with_name(file)
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
