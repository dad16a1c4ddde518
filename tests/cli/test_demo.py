"""The command, as a person runs it."""

import subprocess
import sys

from allgrad.cli import demo


def run(*words):
    return subprocess.run(
        [sys.executable, "-m", "allgrad", *words],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_demo_shows_every_rank_beside_one_process():
    done = run("demo", "--ranks", "3")
    assert done.returncode == 0, done.stderr
    assert "210 220 230" not in done.stdout  # that is four ranks' gradient
    for held, gradient in (("1 2", "6 12"), ("11", "66"), ("21 22 23", "126 132 138")):
        assert any(held in line and line.count(gradient) == 2 for line in done.stdout.splitlines())
    assert "Largest difference between 3 processes and one: 0" in done.stdout


def test_demo_fails_when_a_gradient_is_wrong(monkeypatch):
    right = demo._in_one_process
    wrong = [o._replace(gradient=o.gradient + 1) for o in right(2)]
    monkeypatch.setattr(demo, "_in_one_process", lambda _: wrong)
    assert demo.show(2) is False


def test_bad_options_are_named():
    done = run("demo", "--ranks", "0")
    assert done.returncode == 2
    assert "--ranks" in done.stderr
