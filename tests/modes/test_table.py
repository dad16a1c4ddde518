"""Every mode through every kind of collective, eager and compiled: exact, or an error of ours.

benchmarks/results/modes.json has the outcome of each combination, docs/modes.md shows them. The suite
runs a part of the combinations and compares; ``ALLGRAD_ALL=1`` runs all of them, on 2 and on 3
ranks, and ``ALLGRAD_STORE_RESULTS=1`` stores their outcomes; then ``make docs`` writes the page.
"""

import os
import runpy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from allgrad._core.torch_internals import FINDS_LENGTHS_IN_TRANSFORMS
from allgrad.testing import run_ranks
from calls import CALLS, EVERYTHING, KINDS, Place
from differentiation import MODES, RANK, WANTED, Through
from exactness import same

GENERATOR = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "generate.py"))
# In the suite: another mode for every other kind, for a compiled derivative costs a second or more.
SOME = KINDS if EVERYTHING else KINDS[::2]


def combinations(name):
    """Which modes to compile for one kind."""
    return MODES if EVERYTHING else [MODES[4 * KINDS.index(name) % len(MODES)]]


def outcome(case, mode, run_as):
    data = case.data()
    if run_as == "eager":
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
    same(got.detach(), WANTED[mode](case), f"{mode}, {run_as}")
    return "exact"


def outcomes(name, eager, traced, sizes_given=True):
    at = Place(dist.get_rank(), dist.get_world_size(), sizes_given=sizes_given)
    case = Through(CALLS[name], at)
    found = {f"{mode} eager": outcome(case, mode, "eager") for mode in eager}
    return found | {f"{mode} compiled": outcome(case, mode, "compiled") for mode in traced}


@pytest.mark.one_in(4)
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", SOME)
def test_every_mode_is_exact_or_refused(name):
    eager = MODES if EVERYTHING else ()  # test_func runs them all
    by_rank = []
    for world in (2, 3) if EVERYTHING else (2,):
        by_rank += run_ranks(outcomes, world, name, eager, combinations(name), timeout=580)
    assert all(found == by_rank[0] for found in by_rank)
    known = GENERATOR["load"]("modes")
    if os.environ.get("ALLGRAD_STORE_RESULTS"):
        known[name] = by_rank[0]
        GENERATOR["store"]("modes", known)
    assert by_rank[0].items() <= known[name].items()


# Where a result may have no elements, torch cannot trace a tangent of it: it asks for its length.
MAY_BE_EMPTY = ("all_to_all", "permute", "shift")
FORWARD = [mode for mode in MODES if any(word in mode for word in ("jvp", "dual", "fwd", "hess"))]
FIND_SIZES = ("all_gather", "all_gather, same", "all_to_all", "gather", "permute", "shift")


@pytest.mark.skipif(not FINDS_LENGTHS_IN_TRANSFORMS, reason="a ModeError before torch 2.13")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", FIND_SIZES if EVERYTHING else ("all_gather", "shift"))
def test_every_mode_is_exact_with_sizes_found_out(name):
    eager = MODES if EVERYTHING else ()
    traced = [mode for mode in MODES if name not in MAY_BE_EMPTY or mode not in FORWARD]
    if not EVERYTHING:
        traced = ["vmap(vmap)" if name == "shift" else "jacfwd"]
    for world in (2, 3) if EVERYTHING else (2,):
        for found in run_ranks(outcomes, world, name, eager, traced, False, timeout=580):
            assert set(found.values()) == {"exact"}, found


def test_every_kind_and_every_mode_is_in_the_table():
    assert list(GENERATOR["load"]("modes")) == list(KINDS)
    assert sorted(MODES) == sorted(mode for modes in GENERATOR["MODES"].values() for mode in modes)
