"""The suite's share of the fuzzer: a fixed set of programs on every world, and a few faults."""

import pytest

import reference
from fuzz import faults
from fuzz.coverage import Coverage, describe, features
from fuzz.generate import generate
from fuzz.minimise import minimise
from fuzz.ranks import check
from fuzz.transforms import ENDINGS

PROGRAMS = 240
TRANSFORMED = 100
FAULTS = 3


def programs_of(world, seeds=PROGRAMS, **kind):
    programs = (generate(seed, **kind) for seed in range(seeds))
    return [program for program in programs if program.world == world]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_ranks_agree_with_one_process(world, half):
    for find in check(programs_of(world)[half::2]):
        short = minimise(find, seconds=60)
        pytest.fail(describe(short.program, short.how), pytrace=False)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_transforms_on_ranks_agree_with_one_process(world):
    for find in check(programs_of(world, TRANSFORMED, transforms=True)):
        short = minimise(find, seconds=60)
        pytest.fail(describe(short.program, short.how), pytrace=False)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("seed", range(1, 1 + FAULTS))
def test_every_rank_ends_when_one_misbehaves(seed):
    how = faults.check_fault(seed)
    if how:
        pytest.fail(how, pytrace=False)


def test_a_seed_gives_one_program():
    assert [generate(seed) for seed in range(40)] == [generate(seed) for seed in range(40)]


def test_every_transform_is_in_the_share():
    programs = [p for world in (2, 3, 4) for p in programs_of(world, TRANSFORMED, transforms=True)]
    assert {program.ending for program in programs} == set(ENDINGS)


def test_every_feature_is_in_the_share():
    coverage = Coverage()
    for seed in range(PROGRAMS):
        coverage.add(features(generate(seed)))
    wanted = {f"ag.{name}" for name in FUNCTIONS} | {f"world of {n}" for n in range(1, 5)}
    wanted |= {f"op={op}" for op in reference.STACKED} | {"grad=same", "grad=none"}
    wanted |= {f"ending: {ending}" for ending in ("each", "together", "tie", "second")}
    wanted |= {"lockstep", "checked", "deadline", "hook", "in place", "checkpoint", "reentrant"}
    wanted |= {"nest", "async", "subgroup", "axis", "group mesh", "sizes equal", "sizes given"}
    wanted |= {"empty piece", "ragged", "strides", "large", "several losses", "numbers: ties"}
    wanted |= {"float32", "float16", "bfloat16", "complex", "numbers: int", "numbers: bool"}
    wanted |= {"a rank without loss", "a rank without gradient", "waited in another order"}
    wanted |= {"waited earlier on some ranks", "waited without grad"}
    wanted |= {"thread", "histories by rank", "no_grad"}
    assert not wanted - set(coverage.single)


FUNCTIONS = (
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "gather",
    "gather_sizes",
    "permute",
    "reduce",
    "reduce_scatter",
    "scan",
    "scatter",
    "share",
    "shift",
    "split",
)


@pytest.mark.timeout(180)
def test_a_difference_is_found_and_minimised(monkeypatch):
    """Let the one process be wrong about scan, instead of the ranks."""
    right = reference.scan
    monkeypatch.setattr(reference, "scan", lambda *a, **k: [2 * y for y in right(*a, **k)])
    programs = [p for p in programs_of(2) if "ag.scan" in features(p)][:8]
    find = next(iter(check(programs)))
    short = minimise(find)
    assert [call.name for call in short.program.calls()] == ["scan"]
    assert len(short.program.body) <= 3
    script = describe(short.program, short.how)
    compile(script, "script", "exec")
    assert f"--seed {find.program.seed}" in script
