"""Write every generated page and table of docs/: ``make docs``, or ``python docs/generate.py``.

    docs/collectives.md     from the docstrings
    docs/performance.md     its tables, from benchmarks/results/collectives.json and world_size.json
    docs/modes.md           its table, from benchmarks/results/modes.json
    docs/failures.md        its tables, from benchmarks/results/failures.json and
                            failures_between_hosts.json
    docs/plan.md            its table, from benchmarks/results/plan.json

``python docs/generate.py RUN.json ...`` first stores runs of ``allgrad bench --json RUN.json`` in
collectives.json. The tests write the others with ``ALLGRAD_STORE_RESULTS=1``.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import allgrad as ag

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
TABLE = re.compile(r"(?<=<!-- generated -->\n).*?(?=\n<!-- end -->)", re.DOTALL)
RANKS_TABLE = re.compile(r"(?<=<!-- generated: ranks -->\n).*?(?=\n<!-- end -->)", re.DOTALL)
HOSTS_TABLE = re.compile(r"(?<=<!-- generated: hosts -->\n).*?(?=\n<!-- end -->)", re.DOTALL)

COLLECTIVES = (
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce"),
    *("gather", "scatter", "permute", "shift", "scan", "share", "split", "gather_sizes"),
)

INTRODUCTION = """# The collectives

Written from the docstrings by `make docs`. For every collective:

- `x` is a tensor, or any nest of dicts, lists, tuples, named tuples and dataclasses of tensors: the leaves
  of one dtype are sent in one message, and each has its own gradient. What is no tensor, a number or a text, stays
  as it is on each rank: make a tensor of a number that is to be reduced.
- `sizes=None` exchanges the sizes in one small message; a sequence of ints is trusted and needs no exchange;
  `"equal"` promises that all pieces have one size.
- `group` is `None`, a `ProcessGroup`, a 1-D `DeviceMesh`, or `(mesh, "axis")`; ranks are ranks within it.
- `async_op=True` starts the call and returns a handle; `handle.wait()` returns the result. In backward the roles
  are swapped: `wait` starts the adjoint and the start waits for it, so the overlap is mirrored. `min`, `max`,
  `prod` and `logsumexp` are complete when the handle is returned. Do not change the input before `wait()`: the
  call may not have read it yet. Handles may be waited for in any order; backward has the order of the starts.
  Those of different groups are waited for in one order on all ranks.
- While grad mode is on, a floating-point result requires grad on every rank, also of an input that does not. For
  counts and metrics use `grad="none"`, which every collective takes, or `torch.no_grad()`.
- Inputs are never changed; results are new, contiguous tensors. Only `share` gives a view of its input, which sends nothing and copies nothing.
"""

# The columns of docs/modes.md.
MODES = {
    "autograd": ("backward",),
    "grad, vjp, functional_call": ("grad", "vjp", "functional_call"),
    "jvp, dual numbers": ("jvp", "dual numbers"),
    "jacrev, jacfwd, hessian": ("jacrev", "jacfwd", "hessian", "jacrev(jacfwd)"),
    "grad(grad), grad(jvp), jvp(grad)": ("grad(grad)", "grad(jvp)", "jvp(grad)"),
    "vmap": ("vmap", "vmap, in_dims=1", "vmap, in_dims=-1", "vmap(vmap)"),
    "vmap and derivatives": ("vmap(grad)", "vmap(jvp)", "jvp(vmap)", "grad(vmap)"),
}


def pages() -> dict[Path, str]:
    """Every page with a generated part, as it should be."""
    tables: dict[str, Callable[[Any], str]] = {
        "performance": performance_table,
        "modes": modes_table,
        "failures": failures_table,
        "plan": plan_table,
    }
    stored = {name: name for name in tables} | {"performance": "collectives"}
    made = {DOCS / "collectives.md": collectives_page()}
    for name, table in tables.items():
        page, text = DOCS / f"{name}.md", table(load(stored[name]))
        made[page] = TABLE.sub(lambda _, text=text: text, page.read_text())
    performance, ranks = DOCS / "performance.md", ranks_table(load("world_size"))
    made[performance] = RANKS_TABLE.sub(lambda _: ranks, made[performance])
    failures, hosts = DOCS / "failures.md", failures_table(load("failures_between_hosts"))
    made[failures] = HOSTS_TABLE.sub(lambda _: hosts, made[failures])
    return made


def load(name: str) -> Any:
    """Stored results."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def store(name: str, results: Any) -> None:
    """Write results, to be stored in the repository."""
    (RESULTS / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")


def collectives_page() -> str:
    """A section for each collective: its signature and its docstring."""
    parts = [INTRODUCTION]
    for name in COLLECTIVES:
        function = getattr(ag, name)
        signature = str(inspect.signature(function)).partition(" -> ")[0]
        signature = re.sub(r": '(?:reductions\.)?([^']*)'", r": \1", signature)
        text = _markdown(inspect.getdoc(function) or "")
        parts.append(f"## {name}\n\n```text\n{name}{signature}\n```\n\n{text}\n")
    return "\n".join(parts)


def _markdown(docstring: str) -> str:
    """Rank pictures become text blocks, code is quoted once."""
    out = []
    for block in docstring.split("\n\n"):
        if all(line.startswith("    ") for line in block.splitlines()):
            picture = "\n".join(line[4:] for line in block.splitlines())
            out.append(f"```text\n{picture}\n```")
        else:
            out.append(block.replace("``", "`"))
    return "\n\n".join(out)


def bench_results(runs: Iterable[Path]) -> list[dict[str, Any]]:
    """Medians in milliseconds and peaks in MiB of all runs of ``allgrad bench``."""
    found = []
    for run in runs:
        read = json.loads(run.read_text())
        for case in read["cases"]:
            implementations = {}
            for name, result in case["implementations"].items():
                times = [round(1e3 * result[part]["median"], 4) for part in ("forward", "both")]
                peak = result["memory"] and [
                    round(result["memory"][k] / 2**20, 1) for k in ("result", "forward", "both")
                ]
                implementations[name] = {"ms": times, "wrong": result["wrong"], "mib": peak}
            about = {key: case[key] for key in ("title", "world", "nbytes", "base")}
            found.append({"cores": read["cores"]} | about | {"implementations": implementations})
    return found


def performance_table(cases: list[dict[str, Any]]) -> str:
    """A row for each case: times of each implementation as multiples of the baseline."""
    rows = []
    for case in sorted(cases, key=lambda c: (c["cores"], -c["world"], c["title"], c["nbytes"])):
        base = case["implementations"][case["base"]]["ms"]
        others = [
            f"{_bold(name)} {result['ms'][0] / base[0]:.2f} / {result['ms'][1] / base[1]:.2f}"
            + (f" (wrong {result['wrong']})" if result["wrong"] else "")
            for name, result in case["implementations"].items()
            if name != case["base"]
        ]
        baseline = f"{case['base']}: {base[0]:.2f} / {base[1]:.2f}"
        size, ranks = _size(case["nbytes"]), f"{case['world']} / {case['cores']}"
        rows.append((case["title"], ranks, size, baseline, ", ".join(others)))
    return _table(("", "ranks / cores", "piece", "baseline, ms", "others, as multiples"), rows)


def ranks_table(measured: dict[str, dict[str, list[float]]]) -> str:
    """A row for each call: microseconds by the number of ranks, and memory with the most of them."""
    worlds = sorted(measured, key=int)
    rows = [
        (
            name,
            *(f"{measured[world][name][0]:,.0f}" for world in worlds),
            f"{measured[worlds[-1]][name][1]:,.0f}",
        )
        for name in measured[worlds[0]]
    ]
    counts = (f"{int(world):,} ranks, us" for world in worlds)
    return _table(("", *counts, f"{int(worlds[-1]):,} ranks, KiB"), rows)


def modes_table(outcomes: dict[str, dict[str, str]]) -> str:
    """A row for each collective, a column for each group of modes."""
    rows = [
        (f"`{name}`", *(_modes_cell(found, modes) for modes in MODES.values()))
        for name, found in outcomes.items()
    ]
    return _table(("", *MODES), rows)


def _modes_cell(found: dict[str, str], modes: Iterable[str]) -> str:
    cells = []
    for run in ("eager", "compiled"):
        refused = [mode for mode in modes if found[f"{mode} {run}"] != "exact"]
        cells.append(f"not {', '.join(refused)}" if refused else "exact")
    return cells[0] if cells[0] == cells[1] else f"{cells[0]}; compiled: {cells[1]}"


def failures_table(scenarios: dict[str, dict[str, Any]]) -> str:
    """A row for each scenario: what each rank ended with, after how many seconds."""
    rows = [
        (scenario["title"], *map(_failures_cell, scenario["ranks"]))
        for scenario in scenarios.values()
    ]
    most = max(len(scenario["ranks"]) for scenario in scenarios.values())
    return _table(("what happens", *(f"rank {rank}" for rank in range(most))), rows)


def plan_table(compared: dict[str, Any]) -> str:
    """A row for each algorithm and world: measured and predicted microseconds by size."""
    cells = compared["cells"]
    sizes = sorted({cell["bytes"] for cell in cells})
    times = {
        (cell["operation"], cell["algorithm"], cell["ranks"], cell["bytes"]): cell for cell in cells
    }
    rows = []
    for operation, algorithm, ranks in dict.fromkeys(key[:3] for key in times):
        found = [times[operation, algorithm, ranks, nbytes] for nbytes in sizes]
        shown = (f"{1e6 * c['measured']:.0f} / {1e6 * c['predicted']:.0f}" for c in found)
        rows.append((f"`{operation}`", algorithm, str(ranks), *shown))
    head = "", "algorithm", "ranks", *(f"{_size(nbytes)}, us" for nbytes in sizes)
    words = [
        f"{good} of {count} ({100 * good // count} %)"
        for good, count in (compared["within_2x"], compared["order"])
    ]
    summary = (
        f"Within a factor of two: {words[0]} times. In the right order: {words[1]} pairs of "
        f"algorithms for one call.\n{compared['links']['about']}; measured / predicted:\n\n"
    )
    return summary + _table(head, rows)


def _failures_cell(end: dict[str, Any]) -> str:
    return f"{end['error']}, {end['seconds']:.1f} s" if "seconds" in end else end["error"]


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def _bold(name: str) -> str:
    return f"**{name}**" if name.startswith("allgrad") else name


def _size(nbytes: int) -> str:
    for unit, word in ((2**20, "MiB"), (2**10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes // unit} {word}"
    return f"{nbytes} B"


def main() -> None:
    if sys.argv[1:]:
        store("collectives", bench_results(map(Path, sys.argv[1:])))
    for page, text in pages().items():
        page.write_text(text)


if __name__ == "__main__":
    main()
