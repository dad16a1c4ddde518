"""What the whole suite needs: which share of the cases it runs, and in which order."""

import itertools
import math
import zlib

import pytest

from calls import EVERYTHING
from places import WORLDS

pytest_plugins = ["pytester"]


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "one_in(n): the suite runs one case of n; ALLGRAD_ALL=1 runs all of them"
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    if not EVERYTHING:
        left_out = set(itertools.chain.from_iterable(map(_left_out, _by_function(items))))
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
    # Ranks stay connected between tests of one world.
    by_file = [(path, list(group)) for path, group in itertools.groupby(items, lambda i: i.fspath)]
    items[:] = [item for _, group in by_file for item in sorted(group, key=_world)]


def _by_function(items):
    functions = {}
    for item in items:
        functions.setdefault((item.fspath, getattr(item, "originalname", None)), []).append(item)
    return functions.values()


def _left_out(cases):
    """Cases in an order of their own, so that no value of a parameter is left out each time."""
    mark = cases[0].get_closest_marker("one_in")
    if mark is None:
        return []
    shuffled = sorted(cases, key=lambda item: zlib.crc32(item.name.encode()))
    return shuffled[math.ceil(len(cases) / mark.args[0]) :]


def _world(item):
    asked = item.callspec.params if hasattr(item, "callspec") else {}
    return WORLDS.get(asked.get("where"), 0) or asked.get("world", 0)
