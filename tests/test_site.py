"""The documentation site: pictures, links, and its pages in a real browser.

What needs the site is skipped without the extra ``docs``, what needs a browser without playwright and
chromium (``ALLGRAD_CHROMIUM`` names another one).
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit
from xml.etree import ElementTree as ET

import pytest

import allgrad as ag

ROOT = Path(__file__).parent.parent
CHROMIUM = os.environ.get("ALLGRAD_CHROMIUM") or shutil.which("chromium")


def load_pictures():
    spec = importlib.util.spec_from_file_location("p", ROOT / "tools" / "rank_pictures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pictures = load_pictures()
ALL_GATHER = """\
rank 0   [ a a ]              [ a a | b | c c c ]
rank 1   [ b ]       --->     [ a a | b | c c c ]
rank 2   [ c c c ]            [ a a | b | c c c ]"""


def drawn(text):
    """The picture as SVG: how many elements of each class, and its words in order."""
    root = ET.fromstring(pictures.svg(text))  # noqa: S314 - made above
    classes, words = {}, []
    for element in root.iter():
        kind = element.get("class", "").split()[0:1]
        classes[kind[0] if kind else ""] = classes.get(kind[0] if kind else "", 0) + 1
        words += [element.text] if element.tag.endswith("}text") else []
    return classes, words


def test_a_picture_has_a_frame_for_each_piece_and_a_tint_for_each_cell():
    classes, words = drawn(ALL_GATHER)
    assert (classes["rank"], classes["frame"], classes["arrow"]) == (3, 6, 1)
    assert (classes["piece"], classes["bar"]) == (3 + 9, 6)
    assert words[:4] == ["rank 0", "a a", "a a", "b"]


def blocks_of(docstring):
    for block in docstring.split("\n\n"):
        if block.startswith("    "):
            yield "\n".join(line[4:] for line in block.splitlines())


@pytest.mark.parametrize("name", [n for n in ag.__all__ if callable(getattr(ag, n))])
def test_no_character_of_a_picture_is_lost(name):
    import inspect

    for block in blocks_of(inspect.getdoc(getattr(ag, name)) or ""):
        if pictures.is_picture(block):
            _, words = drawn(block)
            kept = re.sub(r"-{2,}>|<-{2,}|[\s\[\]|]", "", block)
            assert re.sub(r"[\s\[\]|]", "", "".join(words)) == kept


def test_only_rank_pictures_are_drawn():
    assert pictures.is_picture(ALL_GATHER)
    assert not pictures.is_picture("  rank 0: (2, 8) float32\n  rank 1: (1, 8) float32 [x]")
    assert not pictures.is_picture("rank 0   here\nrank 1   here")
    assert not pictures.is_picture("x = [1]  # ---> rank 0   a")


def test_every_page_is_in_the_navigation():
    named = re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text())
    pages = {p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.md")}
    assert pages <= set(named)
    assert len(named) == len(set(named))


def test_every_public_function_is_in_the_reference():
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    named = set(re.findall(r"^::: allgrad\.(\w+)$", pages, re.MULTILINE))
    assert {name for name in ag.__all__ if callable(getattr(ag, name))} <= named


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site; ``--strict`` makes warnings errors."""
    for package in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(package, reason="needs the extra: pip install allgrad[docs]")
    out = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


class Links(HTMLParser):
    """What a page links to, what it loads, and its anchors."""

    def __init__(self, page):
        super().__init__()
        self.links, self.loads, self.ids = [], [], set()
        self.feed(page.read_text())

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.ids |= {given[key] for key in ("id", "name") if given.get(key)}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        for key in ("src", "href", "srcset", "data"):
            if tag != "a" and given.get(key):
                self.loads.append(given[key])


def test_every_link_resolves_and_nothing_is_loaded_from_elsewhere(site):
    pages = {page: Links(page) for page in site.rglob("*.html") if page.name != "404.html"}
    assert len(pages) > 25
    for page, found in pages.items():
        assert not [url for url in found.loads if urlsplit(url).netloc], page
        for url in [*found.links, *found.loads]:
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            assert target.exists(), f"{page.name}: {url}"
            if parts.fragment and target in pages:
                assert unquote(parts.fragment) in pages[target].ids, f"{page.name}: {url}"


def test_every_public_package_has_a_page_of_reference(site):
    source = ROOT / "src" / "allgrad"
    public = {
        p.stem for p in source.iterdir() if not p.stem.startswith("_") and p.suffix != ".typed"
    }
    internal = {"cli", "collectives", "report"}  # commands, and what allgrad itself exports
    assert public - internal <= {page.stem for page in (site / "reference").glob("*.html")}
    assert 'id="allgrad.losses.clip_loss"' in (site / "reference" / "losses.html").read_text()
    assert "allgrad.compat.variable_gather" in (site / "reference" / "compat.html").read_text()


def test_reference_draws_the_pictures_of_docstrings(site):
    text = (site / "reference" / "collectives.html").read_text()
    for name in ("all_gather", "scan", "split"):
        assert f'id="allgrad.{name}"' in text
    assert text.count('<svg class="rank-picture"') > 20
    assert "---&gt;" not in re.sub(r"<title>.*?</title>", "", text, flags=re.DOTALL)


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    if CHROMIUM is None:
        pytest.skip("needs chromium")
    with sync_api.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def opened(browser, url, scheme="light"):
    """A page, with what it complained of and what it asked for from elsewhere."""
    page = browser.new_page(color_scheme=scheme, viewport={"width": 1280, "height": 900})
    page.trouble = []
    page.on("console", lambda m: page.trouble.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda error: page.trouble.append(str(error)))
    page.on("requestfailed", lambda request: page.trouble.append(request.url))
    page.on("request", lambda r: r.url.startswith("http") and page.trouble.append(r.url))
    page.goto(url)
    page.wait_for_load_state("networkidle")
    return page


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_open_as_files_without_errors(site, browser, scheme, tmp_path):
    shots = Path(os.environ.get("ALLGRAD_SCREENSHOTS", tmp_path))
    for name in ("index", "failures", "reference/collectives"):
        page = opened(browser, f"{(site / name).as_uri()}.html", scheme)
        assert not page.trouble
        assert page.locator("article h1").count() == 1
        page.screenshot(path=shots / f"{name.replace('/', '-')}-{scheme}.png")
        if name != "failures":
            colour = "getComputedStyle(document.querySelector('.rank-picture .frame')).stroke"
            shade = sum(map(int, re.findall(r"\d+", page.evaluate(colour))[:3]))
            assert (shade > 400) == (scheme == "dark")  # lines are light on dark, dark on light
        page.close()


def test_search_works_without_a_server(site, browser, tmp_path):
    page = opened(browser, (site / "index.html").as_uri())
    page.click("input[name=query]")
    page.locator("input[name=query]").press_sequentially("deadline")
    page.wait_for_selector(".md-search-result__link", timeout=10_000)
    shots = Path(os.environ.get("ALLGRAD_SCREENSHOTS", tmp_path))
    page.screenshot(path=shots / "search.png")
    page.locator(".md-search-result__link").first.click()
    page.wait_for_load_state("networkidle")
    assert "deadline" in page.locator("article").inner_text().lower()
    assert not page.trouble
    page.close()
