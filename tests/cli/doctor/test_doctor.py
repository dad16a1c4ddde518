"""The doctor on jobs that are well and on jobs that are not: what is wrong is named, in time."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

from allgrad._wire.probe import SharedStore
from allgrad._wire.world import Rendezvous, rank_of, size_of, stop
from allgrad.cli.doctor import command, exactness, rules
from allgrad.cli.doctor.examination import _plan, examine
from allgrad.cli.doctor.facts import Facts, local_facts
from allgrad.cli.doctor.findings import Status
from allgrad.cli.doctor.launch import Launch, first_host, launch_of
from allgrad.cli.doctor.links import clock_findings, connect, connection_findings, link_findings
from allgrad.cli.doctor.meeting import Meeting
from allgrad.cli.doctor.show import as_text
from allgrad.cli.main import app
from allgrad.errors import InputError
from allgrad.report.units import ranks_text
from allgrad.testing import run_ranks

LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID")
PLAIN = {k: v for k, v in os.environ.items() if k not in LAUNCHER}


def job(size, came, deadline, facts=None):
    """The reports of the ranks that come to a job of ``size``: threads, up to the world's start."""
    store, reports, own = Rendezvous(), {}, local_facts()

    def be(rank):
        launch = Launch("a test", rank, size, rank, "127.0.0.1", store.port)
        reports[rank] = examine(launch, (facts or {}).get(rank, own), deadline=deadline)

    threads = [threading.Thread(target=be, args=(rank,)) for rank in came]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - began < deadline + 5
    (reporter,) = [rank for rank, report in reports.items() if report is not None]
    assert reporter == min(came)
    return reports[reporter]


def problems(report):
    assert report.status is Status.PROBLEM
    for finding in report.findings:
        assert finding.status is Status.OK or (finding.meaning and finding.advice)
    return {f.about: f.found for f in report.findings if f.status is Status.PROBLEM}


def test_good_machine_is_well_and_ranks_are_started(monkeypatch):
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    done = CliRunner().invoke(app, ["doctor", "--ranks", "3", "--json"])
    assert done.exit_code == 0, done.output
    read = json.loads(done.stdout)
    assert read["status"] in {"ok", "warning"}  # three ranks may be more than the cores
    assert list(read["ranks"]) == ["0", "1", "2"]
    found = {finding["about"]: finding for finding in read["findings"]}
    assert found["collectives (cpu)"]["found"] == "14 collectives and gradients exact"
    assert {"versions", "store", "connections", "world", "links within a host (cpu)"} <= set(found)


def as_slurm_ranks(port):
    """On a rank: leave its world, and be started by srun; two hosts, one of them pretended."""
    rank, size = rank_of(), size_of()
    stop()
    launch = launch_of(
        {
            "SLURM_PROCID": str(rank),
            "SLURM_NTASKS": str(size),
            "SLURM_LOCALID": "0",
            "SLURM_JOB_ID": "7",
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NODELIST": "localhost",
            "MASTER_PORT": str(port),
        }
    )
    host, address = ("a", "b", "b")[rank], socket.gethostbyname("localhost")
    facts = replace(local_facts(), host=host, gloo_address=address, cores=2)
    with mock.patch.object(rules, "_LOOPBACK", "none"):  # the pretended hosts share it
        return examine(launch, facts, deadline=20)


def test_srun_job_on_two_hosts_measures_between_them():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    first, *others = run_ranks(as_slurm_ranks, 3, port)
    assert others == [None, None]
    assert first.started_by == "srun"
    found = {finding.about: finding for finding in first.findings}
    assert found["rank order"].found == "a: rank 0; b: ranks 1-2"
    assert {"links within a host (cpu)", "links between hosts (cpu)"} <= set(found)
    assert found["clocks"].status is Status.OK
    assert re.fullmatch(r"at most [0-4]\.\d ms apart from host to host", found["clocks"].found)
    assert first.status is not Status.PROBLEM


def test_missing_rank_is_named_in_time():
    report = job(3, [0, 2], deadline=1.0)
    assert problems(report)["ranks"] == "2 of 3 came (ranks 0, 2); missing: rank 1"
    assert "not tried" in as_text(report)


def test_without_rank_0_the_lowest_rank_reports():
    report = job(3, [1, 2], deadline=1.0)
    assert problems(report)["ranks"] == "2 of 3 came (ranks 1-2); missing: rank 0"


class BusyStore(SharedStore):
    """Takes longer to answer than the shortest wait."""

    def wait(self, key, seconds):
        return super().wait(key, seconds) if seconds > 0.1 else None


def test_what_a_busy_store_holds_is_read_after_the_deadline():
    """Otherwise each rank would take itself for the lowest one, and report."""
    server = Rendezvous()
    store = BusyStore("127.0.0.1", server.port, serve=False, seconds=5.0, name="a test")
    store.put("facts/1", "17")
    assert Meeting(store, 2, 3, time.monotonic()).collect("facts", 0.0) == {1: 17}


def test_two_versions_are_named():
    own = local_facts()
    report = job(2, [0, 1], deadline=5.0, facts={1: replace(own, allgrad="0.0.9", torch="2.11.0")})
    assert problems(report) == {
        "allgrad version": f"{own.allgrad} on rank 0; 0.0.9 on rank 1",
        "torch version": f"{own.torch} on rank 0; 2.11.0 on rank 1",
    }


def test_wrong_interface_is_named():
    wrong = replace(local_facts(), environment={"GLOO_SOCKET_IFNAME": "eth7"}, gloo_address="")
    report = job(2, [0, 1], deadline=5.0, facts={1: wrong})
    assert "rank 1: GLOO_SOCKET_IFNAME=eth7, but" in problems(report)["interface"]


def test_address_of_another_host_is_named():
    elsewhere = replace(local_facts(), gloo_address="192.0.2.77")
    report = job(2, [0, 1], deadline=5.0, facts={1: elsewhere})
    assert "rank 1 cannot listen at 192.0.2.77" in problems(report)["address"]


def test_closed_port_of_the_store_is_named(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    given = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    began = time.monotonic()
    done = CliRunner().invoke(app, ["doctor", "--deadline", "1"])
    assert time.monotonic() - began < 6
    assert done.exit_code == 1
    assert f"127.0.0.1:{port}: connection refused" in done.stdout
    assert "Nothing listens there" in done.stdout


def test_unknown_host_of_the_store_is_named():
    host = "no-such-host.invalid"
    report = examine(Launch("a test", 1, 2, 0, host, 9), local_facts(), deadline=0.3)
    assert problems(report)["store"] == f"{host}:9: this name has no address"


def test_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        at = taken.getsockname()[1]
        launch = Launch("a test", 0, 2, 0, "127.0.0.1", at, serves_store=True)
        report = examine(launch, local_facts(), deadline=1.0)
    assert "Rank 0 cannot serve the store" in as_text(report)
    assert problems(report)["store"].startswith(f"127.0.0.1:{at}: ")


def test_rank_that_ends_in_the_middle_is_named(monkeypatch):
    bring = Meeting.bring

    def bring_facts_only(self, name, value):
        if self.rank == 1 and name == "connect":
            raise InterruptedError
        return bring(self, name, value)

    monkeypatch.setattr(Meeting, "bring", bring_facts_only)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    store, own, report = Rendezvous(), local_facts(), None
    other = threading.Thread(
        target=lambda: examine(Launch("", 1, 2, 1, "127.0.0.1", store.port), own, deadline=1.0)
    )
    other.start()
    report = examine(Launch("", 0, 2, 0, "127.0.0.1", store.port), own, deadline=1.0)
    other.join()
    assert problems(report)["ranks"] == "rank 1 gone when connections were tried"


def wrong_on_rank_1():
    """On a rank: the collectives over a link that damages what rank 1 gets of a broadcast."""
    real = exactness.broadcast
    exactness.broadcast = lambda x, src: real(x, src) + (rank_of() == 1)
    try:
        return exactness.wrong_collectives(rank_of(), size_of(), torch.device("cpu"))
    finally:
        exactness.broadcast = real


def test_damaged_data_is_found():
    wrong = [names for _, names in run_ranks(wrong_on_rank_1, 3)]
    assert wrong[0] == wrong[2] == ["gradient of broadcast"]
    assert wrong[1] == ["broadcast", "gradient of broadcast"]


def test_job_of_torchrun_is_joined():
    launch = ("--nproc-per-node", "2", "--standalone", "-m", "allgrad", "doctor", "--json")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *launch],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**PLAIN, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    read = json.loads(done.stdout)
    assert (read["started_by"], read["size"]) == ("torchrun", 2)


@pytest.mark.parametrize(
    ("changed", "about", "said"),
    [
        ({0: {"shared_memory": 64 << 20}}, "shared memory", "64 MiB"),
        ({0: {"open_files": 64}}, "open files", "rank 0: at most 64"),
        ({1: {"environment": {"ALLGRAD_CHECK": "1"}}}, "environment", "none on ranks 0, 2"),
        ({1: {"host": "b", "gloo_address": "127.0.1.1"}}, "address", "rank 1 would give"),
        ({1: {"host": "b"}}, "rank order", "a: ranks 0, 2; b: rank 1"),
        (
            {r: {"gpus": ["H200"], "environment": {}} for r in range(3)},
            "devices",
            "ranks 0-2 on GPU 0",
        ),
        (
            {0: {"peer_access": [[True, False], [False, True]]}},
            "GPU peer access",
            "none between GPUs 1 and 0",
        ),
        (
            {2: {"host": "b", "environment": {"MASTER_ADDR": "localhost"}}},
            "environment",
            "rank 2: MASTER_ADDR=localhost",
        ),
    ],
)
def test_rules_name_what_is_not_well(changed, about, said):
    good = Facts(
        host="a",
        gloo_address="10.0.0.1",
        cores=8,
        open_files=4096,
        allgrad="1",
        torch="2",
        python="3",
        interfaces={"eth0": "10.0.0.1"},
    )
    well = rules.examine(dict.fromkeys(range(3), good))
    assert {finding.status for finding in well} == {Status.OK}
    facts = {rank: replace(good, **changed.get(rank, {})) for rank in range(3)}
    bad = [f for f in rules.examine(facts) if f.status is not Status.OK and f.about == about]
    assert any(said in f.found for f in bad), [f.found for f in bad]
    assert all(f.meaning and f.advice for f in bad)


def test_gpus_are_tried_where_each_rank_has_its_own():
    def devices(*ranks):
        """``ranks``: how many GPUs each sees, and CUDA_VISIBLE_DEVICES."""
        facts = {
            rank: Facts(
                host="a",
                local_rank=rank,
                gpus=["H200"] * gpus,
                environment={"CUDA_VISIBLE_DEVICES": visible} if visible else {},
            )
            for rank, (gpus, visible) in enumerate(ranks)
        }
        return _plan(facts, [])["devices"]

    both = ["cpu", "cuda"]
    assert devices((2, ""), (2, "")) == devices((1, "3"), (1, "5")) == both
    assert devices((1, ""), (1, "")) == devices((1, "3"), (1, "3")) == ["cpu"]
    assert devices((1, ""), (0, "")) == devices((0, ""), (0, "")) == ["cpu"]


def test_links_and_clocks_that_are_off_are_named():
    hosts = dict(enumerate("abcd"))
    row = [1e-5, 1e-3, 0.001, 0.0001]
    slow = {"0 1": row, "1 2": [1e-5, 1e-2, 2.5, 0.0001], "2 3": row}
    (link,) = link_findings(slow, hosts)
    assert "ranks 1 and 2" in link.found
    (clock,) = clock_findings(slow)
    assert "rank 2 is +2500 ms from that of rank 1" in clock.found
    with socket.create_server(("127.0.0.1", 0)) as free:
        at = f"127.0.0.1:{free.getsockname()[1]}"
        assert connect(at, 1.0) == ""
    (finding,) = connection_findings({0: [1, at, connect(at, 1.0)], 1: [0, at, ""]})
    assert f"rank 0 does not reach rank 1 at {at}: Connection refused" in finding.found


def test_what_another_rank_wrote_is_taken_for_facts_only_if_it_is():
    assert Facts.from_json({"torch": 7, "cores": "many", "host": "a", "more": 1}) == Facts(host="a")
    assert Facts.from_json("__import__('os')") == Facts()


def test_launchers_variables_are_read():
    assert launch_of({}) is None
    assert [first_host(n) for n in ("gpu[07-09,12],x", "a,b", "n1", "r[1-2]c")] == [
        *("gpu07", "a", "n1", "r1c")
    ]
    for bad in ({"RANK": "0"}, {"RANK": "3", "WORLD_SIZE": "2"}, {"RANK": "x", "WORLD_SIZE": "2"}):
        with pytest.raises(InputError):
            launch_of({"MASTER_ADDR": "a", "MASTER_PORT": "1", **bad})
    assert ranks_text([0, 1, 2, 5]) == "ranks 0-2, 5"


@pytest.mark.parametrize("port", ["65536", "0", "99999999999", "-1", "http"])
def test_a_port_that_is_none_is_refused(monkeypatch, port):
    job = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    done = CliRunner().invoke(app, ["doctor", "--deadline", "1"])
    assert done.exit_code == 2, done.output
    said = " ".join(done.stderr.replace("│", " ").split())
    assert re.search(f"MASTER_PORT='?{port}'? is not a (port|number)", said), said
    step = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}
    with pytest.raises(InputError, match="MASTER_PORT"):
        launch_of(step | {"MASTER_ADDR": "a", "MASTER_PORT": port})


def test_contradicting_variables_are_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 2
    assert "WORLD_SIZE" in done.stderr


def test_problem_of_this_machine_starts_no_ranks(monkeypatch):
    wrong = replace(local_facts(), environment={"GLOO_SOCKET_IFNAME": "eth7"})
    monkeypatch.setattr(command, "local_facts", lambda: wrong)
    assert "interface" in problems(command.examine_alone(2, 5.0))
