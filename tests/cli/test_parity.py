"""The command ``allgrad parity``, as a person runs it."""

import pytest
from typer.testing import CliRunner

from allgrad.cli.main import app

MODULE = """
import torch
from torch import nn

def batch(step, rank, ranks):
    return torch.randn(2, 3)

def step(model, x):
    return model(x).square().mean()

def right():
    return dict(make_model=lambda: nn.Linear(3, 2), make_batch=batch, step=step, wrapper="ddp")

def raising():
    return right() | dict(step=lambda model, x: model(x) @ x)

def number():
    return 3

def misspelt():
    return right() | dict(wraper="ddp")
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "own_training.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def test_equal_and_different(module):
    words = ["parity", "own_training:right", "--ranks", "2", "--steps", "1"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "1 step on 2 ranks under DDP equal one process" in done.output
    done = CliRunner().invoke(app, [*words, "--wrapper", "none"])
    assert done.exit_code == 1, done.output
    assert "gradients that stay on their rank" in done.output


def test_a_step_that_raises_is_shown_once():
    done = CliRunner().invoke(app, ["parity", "own_training:raising", "--ranks", "2"])
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit)
    assert done.stderr.count("mat1 and mat2 shapes cannot be multiplied") >= 1
    assert "own_training.py" in done.stderr
    assert "pool.py" not in done.stderr


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("own_training", "MODULE:FUNCTION"),
        ("own_training:wrong", "has no attribute"),
        ("no_module_of_this_name:f", "No module named"),
        ("own_training:number", "returned int"),
        ("own_training:misspelt", "'wraper'"),
        ("os:path", "is no function"),
        ("json:dumps", "needs arguments: obj"),
    ],
)
def test_bad_targets_are_named(target, words):
    done = CliRunner().invoke(app, ["parity", target])
    assert done.exit_code == 2
    assert words in done.stderr
