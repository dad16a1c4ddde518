"""The pictures of docs/recording.md: two recordings, reported and opened in a browser.

    python tools/recording_pictures.py

Needs playwright and chromium. One recording has a slow rank, the other ends in a hang.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

import torch
from playwright.sync_api import sync_playwright

import allgrad as ag
from allgrad.report.findings import find
from allgrad.report.page import write_page
from allgrad.testing import RankFailed, run_ranks

DOCS = Path(__file__).parent.parent / "docs"
RANKS, SLOW = 4, 3


def train(path: str, steps: int, ends_in_hang: bool) -> None:
    """A contrastive step on unequal batches, of which one rank has more, and takes longer."""
    rank = torch.distributed.get_rank()  # noqa: TID251
    torch.set_num_threads(1)
    rows = 96 if rank == SLOW else 48
    tower = torch.nn.Linear(256, 64)
    for _ in range(3):  # connections are made in the first calls
        ag.all_reduce(torch.ones(1), async_op=True).wait()
        ag.all_gather(torch.ones(rows))
    pids = ag.all_gather(torch.tensor([os.getpid()]), sizes="equal").tolist()
    with ag.recorded(path):
        for step in range(steps):
            tower.zero_grad()
            mine = tower(torch.randn(rows, 256))
            time.sleep(0.03 if rank == SLOW else 0.01)  # the rest of a model
            joined = ag.all_gather(mine)
            loss = (mine @ joined.t()).logsumexp(1).mean()
            mean = ag.all_reduce(loss.detach(), "mean", async_op=True)
            if ends_in_hang and step == steps - 1 and rank == 1:
                time.sleep(1)
                kill_all(pids)
            mean.wait()
            loss.backward()
            for gradient in [p.grad for p in tower.parameters()]:
                ag.all_reduce(gradient, "mean", grad="none")


def kill_all(pids: list[int]) -> None:
    """Stop all first: no process sees another one go."""
    for sign in (signal.SIGSTOP, signal.SIGKILL):
        for pid in set(pids) - {os.getpid()}:
            os.kill(pid, sign)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as started:
        browser = started.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        for name, theme, height, hangs in (
            ("recording-light", "light", 1010, False),
            ("recording-dark", "dark", 1010, False),
            ("recording-hang-dark", "dark", 800, True),
        ):
            path = Path(folder) / ("hang" if hangs else "recording")
            if not path.exists():
                try:
                    run_ranks(train, RANKS, str(path), 12, hangs)
                except RankFailed:
                    assert hangs
            page_file = Path(folder) / "report.html"
            write_page(find(path), page_file)
            size = {"width": 1180, "height": height}
            page = browser.new_page(viewport=size, color_scheme=theme)
            page.goto(page_file.as_uri())
            page.evaluate(
                f"document.getElementById('summary').textContent = '{path.name}: ' + data.summary"
            )
            page.screenshot(path=DOCS / f"{name}.png")
        browser.close()


if __name__ == "__main__":
    main()
