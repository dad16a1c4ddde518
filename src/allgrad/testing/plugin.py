"""The pytest plugin: ``@pytest.mark.ranks(1, 2, 4)`` runs a test body on that many real ranks.

    @pytest.mark.ranks(2, 3, timeout=30)
    def test_gradient_sums_over_ranks(rank, world): ...

Collection, fixtures and parameters stay in pytest's process; the body and their values are sent to
every rank. The tests of a module that have the same number of ranks run one after another, so that
a world is started once.

The fixture ``parity`` is ``allgrad.testing.parity``, and fails the test where a step differs.
"""

from __future__ import annotations

import enum
import inspect
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from types import ModuleType

    from allgrad.testing.failures import RankFailed, RanksStuck
    from allgrad.testing.serialization import CannotShip
    from allgrad.testing.step_parity.report import ParityReport

_MARK = "ranks"
_USAGE = "ranks(*worlds, timeout=60, backend='gloo')"


class _SkippedOnRank(Exception):
    """Replaces pytest's own exception, which cannot be pickled: it claims to be in ``builtins``."""


class _PerRank(enum.Enum):
    """Placeholder for a value that only the ranks have."""

    RANK = "the rank, known inside the test body only"


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers", f"{_USAGE}: run the test body on real ranks, once for each world size."
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test for each number of ranks in the marker."""
    mark = metafunc.definition.get_closest_marker(_MARK)
    if mark is None:
        return
    worlds, usage = mark.args, f"{metafunc.definition.name}: {_USAGE}"
    if not worlds or not all(type(world) is int and world > 0 for world in worlds):
        pytest.fail(f"{usage}: give one or more numbers of ranks, not {worlds}.", pytrace=False)
    if unknown := mark.kwargs.keys() - {"timeout", "backend"}:
        pytest.fail(f"{usage}: there is no {', '.join(sorted(unknown))}.", pytrace=False)
    if "world" not in metafunc.fixturenames:
        metafunc.fixturenames.append("world")
    ids = [f"ranks={world}" for world in worlds]
    metafunc.parametrize("world", worlds, ids=ids, indirect=True, scope="module")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse a marker that pytest does not show to :func:`pytest_generate_tests`."""
    if not isinstance(item, pytest.Function) or item.get_closest_marker(_MARK) is None:
        return
    if "world" not in getattr(getattr(item, "callspec", None), "params", ()):
        # It would pass without ranks: collectives of a world of one.
        pytest.fail(
            f"{item.name}: a method of a unittest.TestCase cannot run on ranks.\n"
            "Put the marker on a function, or on a class that inherits from nothing.",
            pytrace=False,
        )


@pytest.fixture(scope="module")
def world(request: pytest.FixtureRequest) -> int:
    """The number of ranks this test runs on."""
    if not hasattr(request, "param"):
        pytest.fail("The fixtures 'world' and 'rank' need @pytest.mark.ranks(...).", pytrace=False)
    return int(request.param)


@pytest.fixture
def rank(world: int) -> object:  # noqa: ARG001 - without a world there is no rank
    """The rank that runs the test body."""
    return _PerRank.RANK


@pytest.fixture
def parity(request: pytest.FixtureRequest) -> Callable[..., ParityReport]:
    """Compare a training step on ranks with one process; fail where it differs."""
    from allgrad.testing.serialization import by_value
    from allgrad.testing.step_parity.report import parity

    def require_parity(*args: Any, **options: Any) -> ParityReport:
        with by_value(_local_modules(request.node)):
            report = parity(*args, **options)
        if not report:
            pytest.fail(str(report), pytrace=False)
        return report

    return require_parity


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the body on the ranks instead of in this process."""
    mark = pyfuncitem.get_closest_marker(_MARK)
    if mark is None:
        return None
    from allgrad.testing.failures import RankFailed
    from allgrad.testing.ranks import run_ranks
    from allgrad.testing.serialization import CannotShip, by_value

    wanted = inspect.signature(pyfuncitem.obj).parameters
    values = {name: value for name, value in pyfuncitem.funcargs.items() if name in wanted}
    size = pyfuncitem.callspec.params["world"]
    assert isinstance(size, int)
    with by_value(_local_modules(pyfuncitem)):
        try:
            run_ranks(_on_rank, size, pyfuncitem.obj, values, **mark.kwargs)
        except CannotShip as error:
            raise pytest.fail.Exception(_unpicklable(values, error), pytrace=False) from None
        except RankFailed as failure:
            _raise_outcome(pyfuncitem, failure)
            raise
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the failure of the ranks instead of the traceback in pytest's process."""
    report = yield
    error = call.excinfo.value if call.excinfo else None
    if report.failed and isinstance(error, _rank_errors()):
        report.longrepr = _RanksRepr(report.location, error)  # type: ignore[assignment]
    return report


class _RanksRepr:
    """What pytest prints, also in its summary."""

    def __init__(
        self, location: tuple[str, int | None, str], error: RankFailed | RanksStuck
    ) -> None:
        self._text = str(error)
        path, line, _ = location
        self.reprcrash = SimpleNamespace(path=path, lineno=(line or 0) + 1, message=error.headline)

    def __str__(self) -> str:
        return self._text

    def toterminal(self, terminal: Any) -> None:
        for line in self._text.splitlines():
            terminal.line(line, red=line.startswith("rank "), bold=line.endswith("failed:"))


def _on_rank(body: Callable[..., object], values: dict[str, object]) -> None:
    from allgrad._wire.world import rank_of

    try:
        result = body(
            **{name: rank_of() if v is _PerRank.RANK else v for name, v in values.items()}
        )
        if inspect.isawaitable(result) or inspect.isasyncgen(result) or inspect.isgenerator(result):
            raise TypeError("the test is a coroutine or a generator: its body has not run on ranks")
    except pytest.skip.Exception as outcome:
        skipped = _SkippedOnRank(str(outcome))
        skipped.add_note("Skip the test on every rank, or on none.")
        raise skipped.with_traceback(outcome.__traceback__) from None
    finally:
        # The process also runs the next test, and pytest's own teardown does not reach it.
        for value in values.values():
            if isinstance(value, pytest.MonkeyPatch):
                value.undo()


def _raise_outcome(item: pytest.Function, failure: RankFailed) -> None:
    """Skip or xfail, if every rank does, or raise what ``xfail(raises=...)`` expects of every rank."""
    outcomes = [error.exception for error in failure.failures.values()]
    if len(outcomes) < failure.world:
        return
    if all(isinstance(outcome, _SkippedOnRank) for outcome in outcomes):
        # Otherwise pytest reports this line as the location of the skip.
        raise pytest.skip.Exception(str(failure.root.exception), _use_item_location=True)
    if all(isinstance(outcome, pytest.xfail.Exception) for outcome in outcomes):
        pytest.xfail(str(failure.root.exception))
    for mark in item.iter_markers("xfail"):
        expected = mark.kwargs.get("raises")
        root = failure.root.exception
        if expected and root and all(isinstance(outcome, expected) for outcome in outcomes):
            raise root from failure


def _local_modules(item: pytest.Function) -> set[ModuleType]:
    """The module of the test and the conftests, which ranks may not be able to import by name."""
    plugins = item.config.pluginmanager.get_plugins()
    return {item.module} | {
        plugin
        for plugin in plugins
        if inspect.ismodule(plugin) and (plugin.__file__ or "").endswith("conftest.py")
    }


def _unpicklable(values: dict[str, object], error: CannotShip) -> str:
    """Name the fixture whose value cannot be pickled; if it is none of them, keep the error."""
    from allgrad.testing.serialization import CannotShip, serialize

    for name, value in values.items():
        try:
            serialize(value, f"The fixture {name!r} has a value that")
        except CannotShip as found:
            return f"{found}\nUse it in a fixture, not in the body."
    return str(error)


def _rank_errors() -> tuple[type[RankFailed], type[RanksStuck]]:
    from allgrad.testing.failures import RankFailed, RanksStuck

    return RankFailed, RanksStuck
