"""torchrun over two hosts starts a job again by itself, and it goes on from its last checkpoint."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from allgrad.testing import Hosts, why_no_hosts

EXAMPLE = Path(__file__).parents[2] / "examples" / "restart.py"
STEPS = 1500
RANKS_PER_HOST = 2
SETTINGS = {
    "GLOO_SOCKET_IFNAME": "eth0",
    "OMP_NUM_THREADS": "1",
    # A store for each attempt: in a shared one a rank can read the address of a killed rank.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


def launch(hosts, host, checkpoint, output):
    """torchrun on one host, in a session of its own."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--max-restarts=2"]
    launcher += [f"--nproc-per-node={RANKS_PER_HOST}", "--rdzv-backend=c10d", "--rdzv-id=job"]
    launcher += [f"--rdzv-endpoint={hosts.address(0)}:29400", f"--local-addr={hosts.address(host)}"]
    launcher += [f"--rdzv-conf=is_host={int(host == 0)}"]  # these names are known to nobody
    return subprocess.Popen(
        hosts.command(host, [*launcher, str(EXAMPLE), str(checkpoint), str(STEPS)]),
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**os.environ, **SETTINGS},
        start_new_session=True,
    )


def steps_saved(checkpoint):
    return torch.load(checkpoint)[0] if checkpoint.exists() else 0


@pytest.mark.skipif(
    not os.environ.get("ALLGRAD_ALL"),
    reason="on one host in test_examples.py; ALLGRAD_ALL=1 runs it on two",
)
@pytest.mark.skipif(why_no_hosts() != "", reason=why_no_hosts())
@pytest.mark.timeout(150)
def test_killed_ranks_of_a_host_are_started_again(tmp_path):
    checkpoint, texts = tmp_path / "checkpoint", [tmp_path / "0.txt", tmp_path / "1.txt"]
    with Hosts(2, rate="1gbit") as hosts:
        jobs = [launch(hosts, host, checkpoint, texts[host].open("w")) for host in range(2)]
        try:
            while not (before := steps_saved(checkpoint)):
                assert all(job.poll() is None for job in jobs), [t.read_text() for t in texts]
                time.sleep(0.02)
            ranks = Path(f"/proc/{jobs[1].pid}/task/{jobs[1].pid}/children").read_text().split()
            assert len(ranks) == RANKS_PER_HOST
            for rank in ranks:
                os.kill(int(rank), signal.SIGKILL)
            ended = [job.wait(120) for job in jobs]
        finally:
            for job in jobs:
                if job.poll() is None:
                    os.killpg(job.pid, signal.SIGKILL)
    told = "".join(text.read_text() for text in texts)
    assert ended == [0, 0], told
    begun = [int(line.split()[-1]) for line in told.splitlines() if "begins with step" in line]
    assert sorted(begun)[: 2 * RANKS_PER_HOST] == [0] * (2 * RANKS_PER_HOST)
    assert len(begun) == 4 * RANKS_PER_HOST, told
    assert before <= max(begun) < STEPS
    assert told.count("the parameters are those of one process") == 2 * RANKS_PER_HOST
