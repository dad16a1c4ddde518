"""``allgrad plan``: its table, its JSON, a step of clip_loss, and clear errors."""

import json
import os
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from allgrad._wire import algorithms
from allgrad._wire.groups import Backend
from allgrad._wire.link_model import LOOPBACK
from allgrad.cli.files import require_writable
from allgrad.cli.main import app
from allgrad.cli.plan.clip_step import ClipStep
from allgrad.losses import clip_loss
from allgrad.testing import run_ranks
from counting import Counted


def run(*words, columns=120):
    return CliRunner().invoke(app, ["plan", *words], env={"COLUMNS": str(columns)})


def test_every_call_and_the_step_in_three_worlds(tmp_path):
    path = tmp_path / "plan.json"
    done = run("--json", str(path), "--tflops", "1")
    assert done.exit_code == 0, done.output
    assert "16,384 ranks on 2,048 hosts" in done.output
    found = json.loads(path.read_text())
    assert {row["operation"] for row in found["calls"]} == set(algorithms.TABLE)
    assert all(row["seconds"] > 0 and row["memory"] > 0 for row in found["calls"])
    assert [step["ranks"] for step in found["clip_loss"]] == [64, 1024, 16384]
    assert [step["ring"] for step in found["clip_loss"]] == [False, False, True]
    assert found["clip_loss"][0]["seconds"] < found["clip_loss"][1]["seconds"]


def test_options_replace_entries_of_the_table(tmp_path):
    times = {}
    for rate in ("100Mbit", "10Gbit"):
        path = tmp_path / f"{rate}.json"
        words = ("--ranks", "16", "--only", "all_gather", "--sizes", "4MiB", "--json", str(path))
        assert run(*words, "--between-bandwidth", rate).exit_code == 0
        found = json.loads(path.read_text())
        times[rate] = found["calls"][0]["seconds"]
        assert found["links"]["latency"] == LOOPBACK.latency
    assert times["100Mbit"] > 2 * times["10Gbit"]


@pytest.mark.parametrize("columns", [30, 50])
def test_a_narrow_terminal_shows_every_name_and_number(columns):
    done = run("--ranks", "16", "--only", "all_gather,reduce_scatter", columns=columns)
    assert done.exit_code == 0, done.output
    rows = [line.split("│")[1:-1] for line in done.output.split("\n") if line.startswith("│")]
    names, calls = ("".join(row[at].strip() for row in rows) for at in (0, 1))
    assert names.startswith("all_gatherreduce_scatter")
    assert "gradientsofkeys:reduce_scatter,across_hosts" in calls.replace(" ", "")
    assert "…" not in done.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--ranks", "1"), "numbers of ranks"),
        (("--ranks", "many"), "numbers of ranks"),
        (("--only", "scan"), "There is no scan to plan"),
        (("--sizes", "3"), "not a size"),
        (("--latency", "fast"), "not a quantity"),
        (("--between-bandwidth", "-1Gbit"), "not a quantity"),
        (("--bandwidth", "1e400GB/s"), "not a quantity"),
        (("--bandwidth", "1e300GB/s"), "not a quantity"),
        (("--latency", "inf us"), "not a quantity"),
        (("--latency", "nan us"), "not a quantity"),
        (("--links", "nowhere.json"), "no table of links"),
        (("--json", "nowhere/plan.json"), "no directory"),
        (("--json", "/proc/plan.json"), "cannot be written"),
        (("--cores", "0"), "--cores"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_bad_input_says_what_to_give(words, said):
    done = run(*words)
    assert done.exit_code == 2
    assert said in " ".join(done.output.replace("│", " ").split())


def test_names_of_the_user_are_shown_as_they_are(tmp_path):
    """Square brackets are no markup of rich, and colons no emoji."""
    path, name = tmp_path / "links[red].json", "[/b] our [red]cluster :x:"
    replace(LOOPBACK, about=name).write(path)
    done = run("--ranks", "16", "--links", str(path), columns=400)
    assert done.exit_code == 0, done.output
    assert f"links: {name}. Predicted" in done.output
    done = run("--links", "[/b] links[red].json", columns=400)
    assert done.exit_code == 2
    assert "[/b] links[red].json" in done.output


def calls_of_a_step(pairs):
    q, k = (torch.randn(pairs, 8, requires_grad=True) for _ in range(2))
    with Counted() as calls:
        clip_loss(q, k, torch.tensor(1.0), sizes="equal").backward()
    return list(calls)


@pytest.mark.parametrize(("pairs", "calls"), [(5, 2), (200, 3)])
def test_the_step_is_made_of_the_calls_that_the_loss_makes(pairs, calls):
    plan = ClipStep(pairs, 8, torch.float32, Backend.GLOO).plan(3, LOOPBACK)
    want = [call.operation for call in plan.calls]
    assert len(want) == calls
    assert run_ranks(calls_of_a_step, 3, pairs) == [want] * 3


def test_a_pipe_is_not_opened_before_the_work(tmp_path):
    """Whoever reads it would see its end; without a reader the command would wait."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    require_writable(pipe, "--json")
    assert pipe.is_fifo()
