"""Every mode through every kind of collective, eager and compiled: exact, or an error of ours.

``outcomes.json`` has the outcome of each combination, docs/modes.md shows them. The suite runs a part
of the combinations and compares; ``ALLGRAD_ALL=1`` runs all of them, on 2 and on 3 ranks, and
``ALLGRAD_WRITE_DOCS=1`` writes both files as well.
"""

import json
import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from allgrad.testing import run_ranks
from calls import CALLS, EVERYTHING, KINDS, Place
from differentiation import MODES, RANK, WANTED, Through
from exactness import same

HERE = Path(__file__).parent
OUTCOMES = HERE / "outcomes.json"
PAGE = HERE.parent.parent / "docs" / "modes.md"
WRITE = bool(os.environ.get("ALLGRAD_WRITE_DOCS"))

GROUPS = {
    "autograd": ("backward",),
    "grad, vjp, functional_call": ("grad", "vjp", "functional_call"),
    "jvp, dual numbers": ("jvp", "dual numbers"),
    "jacrev, jacfwd, hessian": ("jacrev", "jacfwd", "hessian", "jacrev(jacfwd)"),
    "grad(grad), grad(jvp), jvp(grad)": ("grad(grad)", "grad(jvp)", "jvp(grad)"),
    "vmap": ("vmap", "vmap, in_dims=1", "vmap, in_dims=-1", "vmap(vmap)"),
    "vmap and derivatives": ("vmap(grad)", "vmap(jvp)", "jvp(vmap)", "grad(vmap)"),
}
# In the suite: another mode for every other kind, for a compiled derivative costs a second or more.
SOME = KINDS if EVERYTHING else KINDS[::2]


def combinations(name):
    """Which modes to compile for one kind."""
    return MODES if EVERYTHING else [MODES[4 * KINDS.index(name) % len(MODES)]]


def outcome(case, mode, way):
    data = case.data()
    if way == "eager":
        run = RANK[mode]
    elif mode == "backward":

        def run(f, loss, d):
            return RANK[mode](torch.compile(f, fullgraph=True, backend="aot_eager"), loss, d)

    else:
        torch._dynamo.reset()
        traced = torch.compile(
            lambda: RANK[mode](case.function, case.loss, data), fullgraph=True, backend="aot_eager"
        )

        def run(*_):
            return traced()

    try:
        got = run(case.function, case.loss, data)
    except Exception as error:
        if "ModeError" not in f"{type(error).__name__} {error}":
            raise
        return "refused"
    same(got.detach(), WANTED[mode](case), f"{mode}, {way}")
    return "exact"


def outcomes(name, eager, traced):
    case = Through(CALLS[name], Place(dist.get_rank(), dist.get_world_size(), sizes_given=True))
    found = {f"{mode} eager": outcome(case, mode, "eager") for mode in eager}
    return found | {f"{mode} compiled": outcome(case, mode, "compiled") for mode in traced}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", SOME)
def test_every_mode_is_exact_or_refused(name):
    eager = MODES if EVERYTHING else ()  # test_func runs them all
    by_rank = []
    for world in (2, 3) if EVERYTHING else (2,):
        by_rank += run_ranks(outcomes, world, name, eager, combinations(name), timeout=580)
    assert all(found == by_rank[0] for found in by_rank)
    known = json.loads(OUTCOMES.read_text()) if OUTCOMES.exists() else {}
    if WRITE:
        known[name] = by_rank[0]
        OUTCOMES.write_text(json.dumps(known, indent=1) + "\n")
    assert by_rank[0].items() <= known[name].items()


def table(known):
    """The outcomes as a table: a row for each kind, a column for each group of modes."""
    lines = ["| | " + " | ".join(GROUPS) + " |", "|---" * (1 + len(GROUPS)) + "|"]
    for name in KINDS:
        cells = [cell(known[name], modes) for modes in GROUPS.values()]
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cell(found, modes):
    ways = []
    for way in ("eager", "compiled"):
        refused = [mode for mode in modes if found[f"{mode} {way}"] != "exact"]
        ways.append(f"not {', '.join(refused)}" if refused else "exact")
    return ways[0] if ways[0] == ways[1] else f"{ways[0]}; compiled: {ways[1]}"


def test_the_page_shows_the_outcomes():
    """Generated: the table in docs/modes.md is what the combinations gave."""
    known = json.loads(OUTCOMES.read_text())
    assert set(known) == set(KINDS)
    shown = re.compile(r"(?<=<!-- outcomes -->\n).*?(?=\n<!-- end -->)", re.DOTALL)
    page = PAGE.read_text()
    assert shown.search(page), "docs/modes.md has no place for the table"
    if WRITE:
        PAGE.write_text(shown.sub(lambda _: table(known), page))
    assert shown.search(PAGE.read_text())[0] == table(known)


def test_every_mode_is_in_a_column():
    assert sorted(MODES) == sorted(mode for modes in GROUPS.values() for mode in modes)
