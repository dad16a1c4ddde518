"""The examples in README.md and docs/ are executed: on three ranks, or alone where they say so."""

import re
import runpy
from pathlib import Path

import pytest

from allgrad.testing import run_ranks

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Pages that the site has, made when it is built (tools/site_hooks.py).
MADE = {"changelog.md", "contributing.md", "gallery.md", "security.md"}
FENCE = re.compile(r"^```python( alone)?\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def examples(page, alone):
    """The blocks of one kind, as one program with the line numbers of the page."""
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


@pytest.mark.parametrize("world", [1, 3])
def test_example_of_unequal_batches_agrees_with_one_process(world):
    path = str(ROOT / "examples" / "unequal_batches.py")
    run_ranks(lambda: runpy.run_path(path, run_name="__main__") and None, world)


def test_every_python_block_is_one_of_the_two():
    for page in PAGES:
        fences = re.findall(r"^```(\S.*)$", page.read_text(), re.MULTILINE)
        assert set(fences) <= {"python", "python alone", "text"}, page


GENERATOR = runpy.run_path(str(ROOT / "docs" / "generate.py"))


@pytest.mark.parametrize("page", GENERATOR["pages"](), ids=lambda page: page.name)
def test_generated_pages_are_up_to_date(page):
    assert page.read_text() == GENERATOR["pages"]()[page], "run: make docs"
    assert page.name == "collectives.md" or GENERATOR["TABLE"].search(page.read_text())


def test_stored_results_of_allgrad_are_correct():
    for case in GENERATOR["load"]("collectives"):
        for name, result in case["implementations"].items():
            assert not ("allgrad" in name and result["wrong"]), case["title"]


def anchors(page):
    """The anchors of a page's headings, as the site makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", h).strip().lower()) for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!http)([^)\s]+)", page.read_text()):
        name, _, anchor = target.partition("#")
        leads_to = (page.parent / name).resolve() if name else page
        made = leads_to.parent == ROOT / "docs" and leads_to.name in MADE
        made |= leads_to.parent == ROOT / "docs" / "reference"  # a page for each package
        assert made or leads_to.exists(), f"{page}: {target}"
        assert not anchor or anchor in anchors(leads_to), f"{page}: {target}"
