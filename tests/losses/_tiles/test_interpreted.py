"""Every Triton kernel, without a device: what ``interpreted_kernels.py`` says."""

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
    "some",
    [
        "softmax",
        "sigmoid_tiles",
        "one_rank and clip",
        "one_rank and not clip",
        "not (softmax or sigmoid_tiles or one_rank)",
    ],
)
def test_kernels_equal_the_formulas_in_tritons_interpreter(some):
    kernels = Path(__file__).with_name("interpreted_kernels.py")
    options = "-q", "--no-header", "--tb=short", "-k", some
    command = sys.executable, "-m", "pytest", *options, kernels
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
