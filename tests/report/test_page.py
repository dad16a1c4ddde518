"""The page in a real browser: no errors, no requests, and what it shows can be zoomed and searched."""

import os
import shutil
from pathlib import Path

import pytest

from allgrad.report.findings import find
from allgrad.report.page import write_page
from allgrad.testing import RankFailed, run_ranks
from report.programs import SLOW, STEPS, demo, disagree, hang, train

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
BROWSER = os.environ.get("ALLGRAD_CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="needs chromium"),
    pytest.mark.timeout(180),
]
SCREENSHOTS = os.environ.get("ALLGRAD_SCREENSHOTS")  # a directory, to look at them


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def open_page(browser, tmp_path):
    """Open the page of a recording; what the browser complains about, and asks for, is collected."""
    complaints, requests, contexts = [], [], []

    def open_it(recording, theme="light"):
        file = tmp_path / "report.html"
        write_page(find(recording), file)
        context = browser.new_context(
            viewport={"width": 1280, "height": 900}, color_scheme=theme, offline=True
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(file.as_uri())
        if SCREENSHOTS:
            page.screenshot(
                path=Path(SCREENSHOTS) / f"{recording.name}-{theme}.png", full_page=True
            )
        return page

    yield open_it
    for context in contexts:
        context.close()
    assert complaints == []
    assert all(url.startswith("file:") and url.endswith("report.html") for url in requests)


def recorded(program, path):
    path.mkdir()
    try:
        run_ranks(program, 3, str(path))
    except RankFailed:
        assert program is hang
    return path


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_slow_rank_is_named_and_the_timeline_zooms_and_searches(open_page, tmp_path, theme):
    page = open_page(recorded(train, tmp_path / "slow"), theme)
    assert f"Rank {SLOW} is late in" in page.locator("#headlines p.bad").first.inner_text()
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(247, 248, 250)", "dark": "rgb(17, 21, 28)"}[theme]

    picture = "document.getElementById('lanes').toDataURL()"
    everything, whole = page.evaluate("[view[0], view[1]]"), page.evaluate(picture)
    box = page.locator("#lanes").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 40)
    page.mouse.wheel(0, -400)
    page.wait_for_function("view[1] - view[0] < whole[1] * 0.9")
    assert page.evaluate(picture) != whole
    page.click("#all")
    assert page.evaluate("[view[0], view[1]]") == everything

    page.fill("#search", "all_reduce")
    assert page.locator("#matches").inner_text() == "72 calls"  # half of them in backward
    assert page.evaluate(picture) != whole
    page.press("#search", "Enter")
    assert page.evaluate("view[1] - view[0] < whole[1]")
    page.fill("#search", "programs.py:")
    found = int(page.locator("#matches").inner_text().split()[0])
    assert found == page.evaluate("data.shown[0]")
    page.fill("#search", "")

    # The first of the slowest calls, in the middle of the timeline, has the mouse over it.
    page.locator("#slowest tr:nth-child(2) td:first-child a").click()
    page.evaluate("window.scrollTo(0, 0)")
    box = page.locator("#lanes").bounding_box()
    for row in range(6):
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 35 + 26 * row)
        if page.locator("#hover").is_visible():
            break
    words = page.locator("#hover").inner_text()
    assert "programs.py:" in words
    assert "bytes" in words


def test_the_hung_call_and_the_rank_that_did_not_come_are_named(open_page, tmp_path):
    page = open_page(recorded(hang, tmp_path / "hung"))
    headline = page.locator("#headlines p.bad").first.inner_text()
    assert "Ranks 0, 2 are in call 3" in headline
    assert "Rank 1 has not come: its last call was all_reduce at programs.py:" in headline
    rows = page.locator("#last tr").all_inner_texts()[1:]
    assert ["has not ended" in row for row in rows] == [True, False, True]


def test_the_mismatch_is_shown(open_page, tmp_path):
    page = open_page(recorded(disagree, tmp_path / "mismatch"))
    assert "rank 1: all_reduce of 12 bytes" in "".join(
        page.locator("#headlines p.bad").all_inner_texts()
    )
    assert page.locator("#mismatch td.bad").count() == 2


def test_the_demo_shows_its_lines_by_time_and_bytes(open_page, tmp_path):
    page = open_page(recorded(demo, tmp_path / "demo"))
    assert page.locator("#last").count() == 0  # nothing hangs
    rows = page.locator("#lines tr").all_inner_texts()
    losses = [row for row in rows if "training.py:" in row]
    assert {row.split()[0] for row in losses} >= {"all_gather", "all_reduce"}
    assert any("backward" in row for row in losses)
    page.fill("#search", "all_gather")  # one in each step, and the sizes of the gather at the end
    assert page.locator("#matches").inner_text() == f"{3 * (STEPS + 1)} calls"
