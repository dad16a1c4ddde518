"""The demo, as a person runs it."""

import os
import re
import subprocess
import sys
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

import allgrad as ag
from allgrad._wire.world import rank_of
from allgrad.cli.demo import command, digits, training, worlds
from allgrad.cli.demo.progress import say
from allgrad.cli.main import Loss, app
from allgrad.testing import run_ranks

PNG = b"\x89PNG\r\n\x1a\n"
PLAIN = {k: v for k, v in os.environ.items() if k not in {"FORCE_COLOR", "TTY_COMPATIBLE"}}


def check(printed, out):
    """What every successful run prints and writes."""
    assert not re.search(r"[^\n -~]", printed), "plain output has no control characters"
    difference = re.search(r"any parameter on any rank: (\S+)", printed)
    assert 0 <= float(difference[1]) < 1e-10
    assert out.read_bytes()[:8] == PNG
    assert str(out) in printed


@pytest.mark.parametrize("loss", ["clip", "info_nce"])
def test_ranks_learn_what_one_process_learns(loss, tmp_path):
    out = tmp_path / "curves.png"
    words = ["demo", "--ranks", "2", "--steps", "12", "--loss", loss, "--out", str(out)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    check(done.stdout, out)
    assert "5 steps on 2 ranks under DDP equal one process" in done.stdout


def test_world_of_torchrun_is_joined(tmp_path):
    out = tmp_path / "curves.png"
    launch = ("--nproc-per-node", "2", "--standalone", "-m", "allgrad")
    words = ("demo", "--steps", "12", "--loss", "siglip", "--out", str(out))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *launch, *words],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=PLAIN,
    )
    assert done.returncode == 0, done.stderr
    check(done.stdout, out)
    curves = [
        re.findall(rf"^{who} +step +(\d+)  loss (\S+)  correct +(\S+)%$", done.stdout, re.MULTILINE)
        for who in ("2 ranks", "one process")
    ]
    assert curves[0] == curves[1]
    assert curves[0][-1][0] == "12"
    assert float(curves[0][-1][1]) < float(curves[0][0][1])
    assert done.stdout.count("Largest difference") == 1  # only rank 0 prints


def sabotaged(part, fn, *args):
    """On a rank: train with a broken part."""
    with mock.patch.object(training, *part):  # the rank is kept for the next test
        return fn(*args)


def own_only(gradients, op="sum", **options):
    return gradients


def doubled(gradients, op="sum", **options):
    mean = ag.all_reduce(gradients, op, **options)
    return mean if op == "sum" else [2 * t for t in mean]


def fails_with(monkeypatch, tmp_path, broken):
    def instead(fn, world, *args, **options):
        return run_ranks(sabotaged, world, ("all_reduce", broken), fn, *args, **options)

    monkeypatch.setattr(worlds, "run_ranks", instead)
    words = ["demo", "--ranks", "2", "--steps", "4", "--out", str(tmp_path / "wrong.png")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1, done.output
    assert "the gradients are not the same" in done.output
    return float(re.search(r"any parameter on any rank: (\S+)", done.output)[1])


def test_demo_fails_when_gradients_stay_on_their_rank(monkeypatch, tmp_path):
    assert fails_with(monkeypatch, tmp_path, own_only) > 1e-3


def test_demo_fails_when_gradients_are_off_by_a_factor(monkeypatch, tmp_path):
    assert fails_with(monkeypatch, tmp_path, doubled) > 1e-3


def test_a_parameter_that_is_not_a_number_is_the_largest_difference():
    def run_with(value):
        parameters = {"a": torch.tensor([[1.0]]), "b": torch.tensor([[value]])}
        return training.TrainingResult(
            [], [], {**parameters, "c": torch.tensor([[9.0]])}, torch.empty(0)
        )

    difference, name = command._largest_difference(run_with(float("nan")), run_with(0.0))
    assert (difference != difference, name) == (True, "b")
    assert command._largest_difference(run_with(3.0), run_with(0.5)) == (2.5, "b")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--ranks", "0"),
        ("--ranks", "many"),
        ("--steps", "0"),
        ("--loss", "triplet"),
        ("--backend", "carrier-pigeon"),
        ("--out", "no/such/folder/demo.png"),
        ("--out", "."),
    ],
)
def test_bad_options_are_named(option, value):
    done = CliRunner().invoke(app, ["demo", option, value])
    assert done.exit_code == 2
    assert option in done.stderr


@pytest.mark.skipif(torch.cuda.device_count() >= 4, reason="needs fewer GPUs than ranks")
def test_nccl_without_a_gpu_for_each_rank_is_refused():
    done = CliRunner().invoke(app, ["demo", "--backend", "nccl"])
    assert done.exit_code == 2
    assert "GPU for each of 4 ranks" in " ".join(done.stderr.split())


TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def test_ranks_that_torchrun_did_not_start_are_refused(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    done = CliRunner().invoke(app, ["demo", "--ranks", "3"])
    assert done.exit_code == 2
    assert "torchrun started 2 ranks" in done.stderr


@pytest.mark.parametrize(
    "other",
    [{"LOCAL_WORLD_SIZE": "1"}, {"TORCHELASTIC_USE_AGENT_STORE": ""}, {"RANK": "first"}],
)
def test_a_world_beyond_this_machine_is_refused(monkeypatch, other):
    for name, value in {**TORCHRUN, **other}.items():
        monkeypatch.setenv(name, value)
    done = CliRunner().invoke(app, ["demo"])
    assert done.exit_code == 2
    assert "RANK and WORLD_SIZE" in done.stderr


def test_every_loss_can_be_asked_for():
    assert {loss.value for loss in Loss} == set(training.LOSSES) == set(training._FORMULAS)


def test_batches_are_unequal_and_leave_a_rank_idle_at_times():
    sizes = [training.batch_sizes(step, 4) for step in range(20)]
    assert {sum(one) for one in sizes} == {128}
    assert all(len(set(one)) > 1 for one in sizes)
    assert {one.index(0) for one in sizes[4::5]} == {0, 1, 2, 3}
    assert training.batch_sizes(4, 1) == [128]


def test_pieces_join_to_the_batch():
    def piece():
        learn, _ = digits.load()
        batch = training._batch(learn, 4)
        mine = training._piece(batch, training.batch_sizes(4, 3), rank_of())
        return rank_of(), mine.pictures, mine.tokens, batch.pictures, batch.tokens

    pieces = run_ranks(piece, 3)
    assert [rank for rank, *_ in pieces] == [0, 1, 2]
    for mine, whole in ((1, 3), (2, 4)):
        torch.testing.assert_close(torch.cat([p[mine] for p in pieces]), pieces[0][whole])
    assert [len(p[1]) for p in pieces] == training.batch_sizes(4, 3)


def test_names_of_the_user_are_shown_as_they_are(capsys):
    """Square brackets are no markup of rich, and colons no emoji."""
    say("[/b] run[red] :x:.png")
    assert capsys.readouterr().out == "[/b] run[red] :x:.png\n"
