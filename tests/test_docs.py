"""The examples in README.md and docs/ are executed: on three ranks, or alone where they say so."""

import json
import re
import runpy
from pathlib import Path

import pytest

from allgrad.testing import run_ranks

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```python( alone)?\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def examples(page, alone):
    """The page's blocks of one kind, as one program with the page's line numbers."""
    lines = []
    for block in FENCE.finditer(page.read_text()):
        if bool(block[1]) == alone:
            start = page.read_text()[: block.start(2)].count("\n")
            lines += [""] * (start - len(lines))
            lines += block[2].splitlines()
    return "\n".join(lines)


def execute(source, name):
    exec(compile(source, name, "exec"), {"__name__": "__example__"})


def pages_with(alone):
    return [pytest.param(p, id=p.name) for p in PAGES if examples(p, alone).strip()]


@pytest.mark.parametrize("page", pages_with(alone=False))
def test_examples_run_on_three_ranks(page):
    run_ranks(execute, 3, examples(page, alone=False), str(page))


@pytest.mark.parametrize("page", pages_with(alone=True))
def test_examples_run_alone(page):
    execute(examples(page, alone=True), str(page))


def test_every_python_block_is_one_of_the_two():
    for page in PAGES:
        fences = re.findall(r"^```(\S.*)$", page.read_text(), re.MULTILINE)
        assert set(fences) <= {"python", "python alone", "text"}, page


def test_the_collectives_page_is_what_the_docstrings_say():
    scope = runpy.run_path(str(ROOT / "docs" / "render.py"))
    assert scope["PAGE"].read_text() == scope["render"](), "run: python docs/render.py"


def test_the_performance_page_shows_the_figures_kept_beside_it():
    scope = runpy.run_path(str(ROOT / "docs" / "render_performance.py"))
    figures = json.loads(scope["FIGURES"].read_text())
    shown = scope["PLACE"].search(scope["PAGE"].read_text())
    assert shown[0] == scope["table"](figures), "run: python docs/render_performance.py"
    assert all(
        way["wrong"] == "" for c in figures for n, way in c["ways"].items() if "allgrad" in n
    )


def test_relative_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page}: {target}"
