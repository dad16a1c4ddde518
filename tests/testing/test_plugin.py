from __future__ import annotations

import pytest

from allgrad.testing import run_ranks

HEADER = "import pytest, time, torch, torch.distributed as dist\n"


@pytest.fixture(scope="module", autouse=True)
def ranks_of_this_process() -> None:
    """Start the ranks out here; pytester forgets the modules that an inner run imports first."""
    run_ranks(int, 3)


def run(pytester: pytest.Pytester, source: str, *args: str) -> pytest.RunResult:
    """Run a module in this process, so that its tests use the ranks that are already there."""
    folder = pytester.path / "v1.0"  # a dot: nobody can import the module by name
    folder.mkdir(exist_ok=True)
    (folder / "test_inner.py").write_text(HEADER + source)
    return pytester.runpytest_inprocess(
        "-p",
        "no:cacheprovider",
        "--strict-markers",
        "-ra",
        "-p",
        "no:hypothesispytest",
        "--import-mode=importlib",
        *args,
    )


def test_body_runs_once_for_each_world(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("scale", [2.0, 5.0])
def test_sum(rank, world, scale):
    assert (rank, world) == (dist.get_rank(), dist.get_world_size())
    total = torch.tensor([scale * rank])
    dist.all_reduce(total)
    assert total.item() == scale * sum(range(world))

@pytest.mark.ranks(1, 3)
def test_needs_no_fixture():
    assert dist.get_world_size() in (1, 3)

def test_here():
    assert not dist.is_initialized()
""",
        "-v",
    )
    result.assert_outcomes(passed=7)
    names = [line.split("::")[1].split(" ")[0] for line in result.outlines if "PASSED" in line]
    assert {"test_sum[ranks=1-2.0]", "test_sum[ranks=3-5.0]", "test_here"} <= {*names}
    worlds = [name.split("ranks=")[1][0] for name in names if "ranks=" in name]
    assert worlds == ["1", "1", "1", "3", "3", "3"]  # tests that share a world are neighbours


def test_failure_shows_the_rank_with_assertion_detail(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
def triple(x):
    return 3 * x

@pytest.mark.ranks(3)
def test_wrong(rank):
    if rank == 1:
        assert triple(rank) == 4
    dist.all_reduce(torch.ones(1))
""",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*test_wrong?ranks=3?*",
            "rank 1 of 3 failed:",
            "Traceback (most recent call last):",
            "*test_inner.py*in test_wrong",
            "AssertionError: assert 3 == 4",
            "*where 3 = triple(1)*",
            "rank 0: released (*",
            "rank 2: released (*",
            "FAILED *test_wrong?ranks=3? - rank 1 of 3: Assert*",
        ]
    )
    assert "plugin.py" not in result.stdout.str()


def test_outcomes_and_expected_errors(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
@pytest.mark.ranks(2)
def test_skips():
    pytest.skip("not today")

@pytest.mark.ranks(2)
def test_xfails():
    pytest.xfail("known")

@pytest.mark.ranks(2)
@pytest.mark.xfail(reason="marked")
def test_marked():
    raise ValueError

@pytest.mark.ranks(2)
@pytest.mark.xfail(raises=(ValueError, KeyError), strict=True)
def test_marked_with_what_it_raises(rank):
    raise KeyError if rank else ValueError

@pytest.mark.ranks(2)
@pytest.mark.xfail(raises=ValueError)
def test_one_rank_raises_another_error(rank):
    raise KeyError if rank else ValueError

@pytest.mark.ranks(2)
def test_raises():
    with pytest.raises(ZeroDivisionError, match="division"):
        1 / 0

@pytest.mark.ranks(2)
def test_one_rank_skips(rank):
    if rank == 1:
        pytest.skip("alone")
    dist.all_reduce(torch.ones(1))
""",
    )
    result.assert_outcomes(passed=1, skipped=1, xfailed=3, failed=2)
    result.stdout.fnmatch_lines(
        [
            "rank 1 of 2 failed:",
            '*pytest.skip("alone")',
            "Skip the test on every rank, or on none.",
            "SKIPPED*test_inner.py*: not today",
        ]
    )
    result.stdout.fnmatch_lines(["XFAIL*test_marked*"])


def test_fixtures_and_classes_travel(pytester: pytest.Pytester) -> None:
    pytester.mkdir("v1.0").joinpath("conftest.py").write_text(
        """
import pytest

def plus_one(x):
    return x + 1

@pytest.fixture
def from_conftest():
    return plus_one

@pytest.fixture
def by_world(world):
    return [0] * world
"""
    )
    result = run(
        pytester,
        """
class Box:
    def __init__(self, x):
        self.x = x

@pytest.fixture
def box(tmp_path):
    return Box(tmp_path)

@pytest.mark.ranks(2)
class TestGroup:
    def setup_method(self):
        self.ready = True

    def test_method(self, rank, box, tmp_path, from_conftest, by_world):
        assert self.ready
        assert isinstance(box, Box) and box.x == tmp_path
        assert from_conftest(rank) == rank + 1
        assert by_world == [0, 0]

@pytest.mark.ranks(2)
def test_cannot_travel(request):
    pass

def test_unmarked(rank):
    pass
""",
    )
    result.assert_outcomes(passed=1, failed=1, errors=1)
    result.stdout.fnmatch_lines(["The fixture 'request' has a value that cannot be pickled*"])
    result.stdout.no_fnmatch_line("During handling of the above exception*")
    result.stdout.fnmatch_lines(["*need @pytest.mark.ranks*"])


def test_patches_end_with_their_test(pytester: pytest.Pytester) -> None:
    """The ranks are kept for the next test; what monkeypatch did there is not."""
    result = run(
        pytester,
        """
import os

@pytest.mark.ranks(2)
def test_patches(monkeypatch):
    monkeypatch.setattr(os, "name", "patched")
    monkeypatch.setenv("ALLGRAD_PATCHED", "1")
    assert os.name == "patched"

@pytest.mark.ranks(2)
def test_sees_none_of_it():
    assert os.name != "patched"
    assert "ALLGRAD_PATCHED" not in os.environ
""",
    )
    result.assert_outcomes(passed=2)


def test_selection_and_stopping(pytester: pytest.Pytester) -> None:
    source = """
@pytest.mark.ranks(1, 2)
def test_a():
    assert dist.get_world_size() == 3

@pytest.mark.ranks(1, 2)
def test_b():
    pass
"""
    run(pytester, source, "-k", "test_b").assert_outcomes(passed=2, deselected=2)
    run(pytester, source, "-x").assert_outcomes(failed=1)


def test_time_limit_shows_where_the_ranks_are(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
@pytest.mark.ranks(2, timeout=0.3, backend="gloo")
def test_hangs(rank):
    if rank == 0:
        time.sleep(60)
""",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "1 of 2 ranks did not finish within 0.3 s:",
            "rank 0: stuck at*",
            "*test_inner.py*in test_hangs",
            "rank 1: finished",
        ]
    )
    assert "allgrad/testing" not in result.stdout.str()


def test_a_mark_that_means_nothing_is_refused(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
@pytest.mark.ranks()
def test_none(): pass
""",
    )
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["test_none: *give one or more numbers of ranks*"])
    result = run(
        pytester,
        """
@pytest.mark.ranks(2, limit=3)
def test_unknown(): pass
""",
    )
    result.stdout.fnmatch_lines(["*there is no limit*"])


def test_a_body_that_would_not_run_on_ranks_fails(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
import functools
import unittest

def same(f):
    return functools.wraps(f)(lambda *args, **kwargs: f(*args, **kwargs))

@pytest.mark.ranks(2)
async def test_coroutine(rank):
    assert rank is None

@pytest.mark.ranks(2)
@same
async def test_decorated(rank):
    assert rank is None

@pytest.mark.ranks(2)
class TestOfUnittest(unittest.TestCase):
    def test_method(self):
        assert not dist.is_initialized()
""",
    )
    result.assert_outcomes(failed=2, errors=1)
    result.stdout.fnmatch_lines(["test_method: a method of a unittest.TestCase cannot run on*"])
    result.stdout.fnmatch_lines(["TypeError: the test is a coroutine or a generator*"])


def test_parity_fails_a_test_with_its_report(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
def batch(step, rank, ranks):
    return torch.randn(2, 3)

def total(model, x):
    return model(x).square().sum()

def mean(model, x):
    return model(x).square().mean()

def test_mean(parity):
    assert parity(lambda: torch.nn.Linear(3, 2), batch, mean, ranks=3, wrapper="ddp", steps=1)

def test_total(parity):
    parity(lambda: torch.nn.Linear(3, 2), batch, total, ranks=3, wrapper="ddp", steps=1)
""",
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*every gradient is 3 times too small: averaged by DDP*"])
