"""What mkdocs does for this site beyond its plugins.

pages that are made when the site is built: changelog, contributing, security, gallery
rank pictures, in pages and in docstrings, as SVG
``python alone``, which only the tests read, as ``python``
"""

from __future__ import annotations

import ast
import html
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.structure.files import File
from rank_pictures import is_picture, svg

if TYPE_CHECKING:
    from mkdocs.structure.files import Files

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "allgrad"
_BLOCK = re.compile(
    r'(?:<div class="[^"]*highlight[^"]*">)?<pre[^>]*>(.*?)</pre>(?:</div>)?', re.DOTALL
)
# What a package may import, which its docstring tells, is no matter of its users.
_IMPORTS = re.compile(r"<p>Imports (?:[^<]|<code>[^<]*</code>)*</p>\n?")

# Files of the repository that are pages of the site too.
COPIED = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"} | {
    "security.md": "SECURITY.md"
}

# Commands, what allgrad itself exports, and what only commands use.
INTERNAL = {"cli", "collectives", "report"}
# Packages whose modules are named by their users.
BY_MODULE = {"compat", "integrations"}


def made_pages() -> dict[str, str]:
    """The pages that have no file in docs/."""
    made = {page: site_links((ROOT / source).read_text()) for page, source in COPIED.items()}
    if examples():
        made["gallery.md"] = gallery()
    return made | {f"reference/{name}.md": reference(name) for name in public_packages()}


def public_packages() -> list[str]:
    """The packages and modules of allgrad that users import."""
    names = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or path.is_dir()}
    return sorted(name for name in names - INTERNAL if not name.startswith("_"))


def reference(name: str) -> str:
    """The page of a package: what it exports, and its modules where users name those."""
    parts = [f"# allgrad.{name}\n\n::: allgrad.{name}\n"]
    if name in BY_MODULE:
        for path in sorted((SOURCE / name).glob("[!_]*.py")):
            whole = f"allgrad.{name}.{path.stem}"
            parts.append(f"## {whole}\n\n::: {whole}\n    options: {{heading_level: 3}}\n")
    return "\n".join(parts)


def on_config(config: Any) -> Any:
    """Leave out of the navigation what is not there, and add packages that it does not name."""
    made = set(made_pages())
    there = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    config["nav"] = _existing(config["nav"], there | made)
    (section,) = [entry["Reference"] for entry in config["nav"] if "Reference" in entry]
    for page in sorted(made):
        if page.startswith("reference/") and page not in str(section):
            section.append({f"allgrad.{Path(page).stem}": page})
    return config


def _existing(nav: Any, there: set[str]) -> Any:
    """The entries that lead to a page."""
    if isinstance(nav, str):
        return nav if nav in there else None
    if isinstance(nav, dict):
        kept = {title: _existing(entry, there) for title, entry in nav.items()}
        return {title: entry for title, entry in kept.items() if entry} or None
    return [entry for item in nav if (entry := _existing(item, there))]


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that have no file in docs/."""
    for page, content in made_pages().items():
        files.append(File.generated(config, page, content=content))
    return files


def site_links(text: str) -> str:
    """Links of a file in the root of the repository, as links of a page of the site."""
    text = text.replace("](docs/", "](")
    for page, source in COPIED.items():
        text = text.replace(f"]({source})", f"]({page})")
    return text.replace("](README.md)", "](index.md)")


def examples() -> list[Path]:
    """The programs of the gallery."""
    return sorted((ROOT / "examples").rglob("*.py"))


def gallery() -> str:
    """A section for each program of examples/: its docstring and its source."""
    parts = ["# Gallery\n\nThe programs of `examples/`. Each runs as it is, on ranks or alone.\n"]
    for path in examples():
        source = path.read_text()
        title, _, about = (ast.get_docstring(ast.parse(source)) or path.stem).partition("\n")
        name = path.relative_to(ROOT).as_posix()
        parts.append(f"## {title.strip().rstrip('.')}\n\n{about.strip()}\n")
        parts.append(f'??? example "{name}"\n')
        parts.append("    ```python\n" + "\n".join(f"    {x}" for x in source.splitlines()))
        parts.append("    ```\n")
    return "\n".join(parts)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Names of fences that only the tests tell apart are one to the reader; examples are the gallery."""
    markdown = markdown.replace("](../examples)", "](gallery.md)")
    return markdown.replace("```python alone", "```python")


def on_page_content(content: str, page: Any, **_: Any) -> str:
    """Rank pictures become SVG, wherever they stand."""
    if page.file.src_uri.startswith("reference/"):
        content = _IMPORTS.sub("", content)
    return _BLOCK.sub(_picture, content)


def _picture(block: re.Match[str]) -> str:
    text = html.unescape(re.sub(r"<[^>]*>", "", block[1]))
    return f'<figure class="ranks">{svg(text)}</figure>' if is_picture(text) else block[0]
