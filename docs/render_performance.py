"""Write the measured table of docs/performance.md: ``python docs/render_performance.py RUN.json ...``.

The runs are what ``allgrad bench --json RUN.json`` wrote. The figures are kept in performance.json, of
which the table is made.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE, FIGURES = HERE / "performance.md", HERE / "performance.json"
PLACE = re.compile(r"(?<=<!-- measured -->\n).*?(?=\n<!-- end -->)", re.DOTALL)


def collect(runs: list[Path]) -> list[dict[str, Any]]:
    """Medians in milliseconds and peaks in MiB, of all runs."""
    found = []
    for run in runs:
        read = json.loads(run.read_text())
        for case in read["cases"]:
            ways = {}
            for name, way in case["ways"].items():
                times = [round(1e3 * way[part]["median"], 4) for part in ("forward", "both")]
                peak = way["memory"] and [
                    round(way["memory"][k] / 2**20, 1) for k in ("result", "forward", "both")
                ]
                ways[name] = {"ms": times, "wrong": way["wrong"], "mib": peak}
            about = {key: case[key] for key in ("title", "world", "nbytes", "base")}
            found.append({"cores": read["cores"]} | about | {"ways": ways})
    return found


def table(cases: list[dict[str, Any]]) -> str:
    """A row for each case: times of every way as multiples of the base's, forward / both."""
    lines = [
        "| | ranks / cores | piece | base, ms | ways, as multiples |",
        "|---|---|---|---|---|",
    ]
    for case in sorted(cases, key=lambda c: (c["cores"], -c["world"], c["title"], c["nbytes"])):
        base = case["ways"][case["base"]]["ms"]
        ways = [
            f"{_bold(name)} {way['ms'][0] / base[0]:.2f} / {way['ms'][1] / base[1]:.2f}"
            + (f" (wrong {way['wrong']})" if way["wrong"] else "")
            for name, way in case["ways"].items()
            if name != case["base"]
        ]
        first = f"| {case['title']} | {case['world']} / {case['cores']} | {_size(case['nbytes'])} "
        lines.append(
            first + f"| {case['base']}: {base[0]:.2f} / {base[1]:.2f} | {', '.join(ways)} |"
        )
    return "\n".join(lines)


def _bold(name: str) -> str:
    return f"**{name}**" if name.startswith("allgrad") else name


def _size(nbytes: int) -> str:
    for unit, word in ((2**20, "MiB"), (2**10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes // unit} {word}"
    return f"{nbytes} B"


def main() -> None:
    if sys.argv[1:]:
        FIGURES.write_text(
            json.dumps(collect([Path(run) for run in sys.argv[1:]]), indent=1) + "\n"
        )
    shown = table(json.loads(FIGURES.read_text()))
    PAGE.write_text(PLACE.sub(lambda _: shown, PAGE.read_text()))


if __name__ == "__main__":
    main()
