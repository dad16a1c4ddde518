"""Nothing ends in a hang, a wrong number, or a rank without an error."""

import json
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import allgrad as ag
import allgrad.errors
from allgrad.testing import RankFailed, run_ranks
from faults.scenarios import FAULTY, SCENARIOS, here

GENERATOR = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "generate.py"))


def run_scenario(name, folder):
    """Run it on this rank, and write how it ended to a file before anything else can happen."""
    rank, _ = here()
    ag.all_reduce(torch.ones(1))
    began = time.monotonic()
    ended = {"error": "exact", "text": ""}
    try:
        SCENARIOS[name][0]()
    except Exception as error:  # noqa: BLE001
        ended = {"error": type(error).__name__, "text": str(error)}
    ended["seconds"] = time.monotonic() - began
    Path(folder, f"{rank}.json").write_text(json.dumps(ended))
    dist.destroy_process_group()  # the next scenario starts a new world


@pytest.mark.timeout(90)
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_rank_ends_expected_end(name, tmp_path):
    _, _, world, _, _, within = SCENARIOS[name]
    try:
        run_ranks(run_scenario, world, name, str(tmp_path), timeout=40)
    except RankFailed as failure:
        assert "SIGKILL" in str(failure), failure
    ended = {}
    for rank in range(world):
        file = tmp_path / f"{rank}.json"
        ended[rank] = json.loads(file.read_text()) if file.exists() else {"error": "killed"}
    for rank, how in ended.items():
        wanted = expected_end(name, rank)
        assert how["error"] == wanted, f"rank {rank}: {how}"
        assert how.get("seconds", 0) < within, f"rank {rank}: {how}"
        if rank != FAULTY and wanted in {"RankLost", "RankLate"} and "opposite" not in name:
            named = f"rank {FAULTY} is" in how["text"] or "store" in how["text"]
            assert named, how["text"]
        if wanted == "RankRaised":
            assert f"rank {FAULTY} ended with an error of its own" in how["text"]
            assert "ZeroDivisionError" in how["text"]
        if wanted == "CollectiveMismatch":
            assert "<-" in how["text"]
            assert "scenarios.py:" in how["text"]
    if os.environ.get("ALLGRAD_STORE_RESULTS"):  # in one process: -n 0
        known = GENERATOR["load"]("failures")
        kept = [{k: end[k] for k in ("error", "seconds") if k in end} for end in ended.values()]
        known[name] = {"title": SCENARIOS[name][1], "ranks": kept}
        GENERATOR["store"]("failures", {one: known[one] for one in SCENARIOS if one in known})


def expected_end(name, rank):
    *_, expect, faulty, _ = SCENARIOS[name]
    return faulty if rank == FAULTY else expect


def test_the_page_shows_how_every_rank_ends():
    stored = GENERATOR["load"]("failures")
    assert list(stored) == list(SCENARIOS), "run again with ALLGRAD_STORE_RESULTS=1"
    for name, scenario in stored.items():
        assert scenario["title"] == SCENARIOS[name][1]
        ends = [end["error"] for end in scenario["ranks"]]
        assert ends == [expected_end(name, rank) for rank in range(len(ends))], name


@pytest.mark.ranks(3, timeout=60)
def test_a_new_world_can_start_after_a_deadline(rank):
    """In the same processes: destroy the group that failed, and start a new one."""
    store = dist.group.WORLD.get_group_store()
    with ag.deadline(1):
        if rank == FAULTY:
            time.sleep(4)
        with pytest.raises(allgrad.errors.RankLate):
            ag.all_reduce(torch.ones(2))
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=3)
    assert ag.all_reduce(torch.ones(2)).tolist() == [3.0, 3.0]
    with ag.deadline(20):
        assert ag.all_gather(torch.tensor([rank])).tolist() == [0, 1, 2]


@pytest.mark.ranks(2, timeout=60)
def test_a_deadline_ends_with_its_block(rank):
    ag.all_reduce(torch.ones(2))  # both ranks are there
    with ag.deadline(2), ag.deadline(1):
        ag.all_reduce(torch.ones(2))
    if rank == FAULTY:
        time.sleep(2.5)
    assert ag.all_reduce(torch.ones(2)).tolist() == [2.0, 2.0]


@pytest.mark.ranks(3)
def test_the_group_works_after_a_mismatch(rank):
    for _ in range(3):
        with ag.checked(), pytest.raises(allgrad.errors.CollectiveMismatch):
            ag.all_reduce(torch.ones(2 + (rank == FAULTY)))
        with ag.checked():
            assert ag.all_reduce(torch.ones(2)).tolist() == [3.0, 3.0]
    assert ag.all_gather(torch.ones(rank)).shape == (3,)


@pytest.mark.parametrize(
    "seconds", [0, -1, "soon", "", float("nan"), float("inf"), pytest.param(10**400, id="huge")]
)
def test_a_deadline_is_a_time(seconds):
    with pytest.raises(allgrad.errors.InputError, match="is not a time"), ag.deadline(seconds):
        pass


def test_an_empty_variable_sets_no_deadline():
    program = "import allgrad as ag; assert ag._wire.deadline.seconds_allowed() is None"
    found = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "ALLGRAD_DEADLINE": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
