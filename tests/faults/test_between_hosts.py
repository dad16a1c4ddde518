"""Links that are cut and hosts that are gone: every rank on every host ends in time, and says why."""

import json
import os
import runpy
import threading
import time
from pathlib import Path

import pytest

from allgrad.testing import Hosts, RankFailed, why_no_hosts
from faults.between_hosts import RATE, SCENARIOS, SECONDS, run_scenario

GENERATOR = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "generate.py"))
RANKS_PER_HOST, WORLD = 2, 4
SUITE = ("cut_in_forward", "cut_in_the_size_exchange", "slow_link", "host_gone")
ALL = bool(os.environ.get("ALLGRAD_ALL"))

needs_hosts = pytest.mark.skipif(why_no_hosts() != "", reason=why_no_hosts())


@pytest.fixture(scope="module")
def two_hosts():
    """Made again after a scenario that took one of them away."""
    made = []

    def intact():
        if not made or made[-1].removed:
            for hosts in made:
                hosts.close()
            made.append(Hosts(2, ranks_per_host=RANKS_PER_HOST, rate=RATE).__enter__())
        return made[-1]

    yield intact
    for hosts in made:
        hosts.close()


def run(hosts, name, folder):
    """How each rank ended."""
    scenario = SCENARIOS[name]
    hosts.set_rate(scenario.rate)

    def fault():
        while len(list(folder.glob("*.ready"))) < WORLD:
            time.sleep(0.01)
        scenario.fault(hosts)
        (folder / "fault").touch()

    thread = threading.Thread(target=fault, daemon=True)
    thread.start()
    try:
        hosts.run(run_scenario, name, str(folder), timeout=40, grace=SECONDS + 8)
    except RankFailed as failure:
        assert "SIGKILL" in str(failure), failure
    thread.join()
    if not hosts.removed:
        hosts.restore(1)
    files = [folder / f"{rank}.json" for rank in range(WORLD)]
    return [json.loads(f.read_text()) if f.exists() else {"error": "killed"} for f in files]


@needs_hosts
@pytest.mark.timeout(240)  # new ranks may have to start; a scenario itself has 40 s
@pytest.mark.parametrize("name", [n for n in SCENARIOS if ALL or n in SUITE])
def test_every_rank_on_every_host_ends(two_hosts, name, tmp_path):
    hosts = two_hosts()
    ended = run(hosts, name, tmp_path)
    for rank, how in enumerate(ended):
        host = hosts.host_of(rank)
        expected = SCENARIOS[name].expect[host]
        assert how["error"] in expected, f"rank {rank}: {how}"
        if how["error"] not in {"RankLate", "RankLost"}:
            continue
        assert how["seconds"] < SECONDS + 5, f"rank {rank}: {how}"
        if name != "cut_in_roll_call":
            others = "ranks 2, 3 on host1" if host == 0 else "ranks 0, 1 on host0"
            assert others in how["text"], how["text"]
            assert host == 0 or "the store at 10.77.0.1" in how["text"], how["text"]
    if os.environ.get("ALLGRAD_STORE_RESULTS"):  # in one process: -n 0
        known = GENERATOR["load"]("failures_between_hosts")
        kept = [{k: end[k] for k in ("error", "seconds") if k in end} for end in ended]
        known[name] = {"title": SCENARIOS[name].title, "ranks": kept}
        ordered = {one: known[one] for one in SCENARIOS if one in known}
        GENERATOR["store"]("failures_between_hosts", ordered)


def test_the_page_shows_how_every_rank_ends():
    stored = GENERATOR["load"]("failures_between_hosts")
    assert list(stored) == list(SCENARIOS), "run again with ALLGRAD_ALL=1 ALLGRAD_STORE_RESULTS=1"
    for name, found in stored.items():
        assert found["title"] == SCENARIOS[name].title
        for rank, end in enumerate(found["ranks"]):
            assert end["error"] in SCENARIOS[name].expect[rank // RANKS_PER_HOST], name
