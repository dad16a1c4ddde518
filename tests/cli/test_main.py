"""The command itself, without one of its commands."""

import torch
from typer.testing import CliRunner

import allgrad as ag
from allgrad.cli.main import app


def test_versions_are_shown():
    done = CliRunner().invoke(app, ["--version"])
    assert done.exit_code == 0
    assert done.output == f"allgrad {ag.__version__}, torch {torch.__version__}\n"
