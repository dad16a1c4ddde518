"""What the whole suite needs: which share of the cases it runs, and in which order."""

import itertools

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
        seen = {}
        left_out = []
        kept = []
        for item in items:
            mark = item.get_closest_marker("one_in")
            number = next(seen.setdefault((item.fspath, item.originalname), itertools.count()))
            (left_out if mark and number % mark.args[0] else kept).append(item)
        items[:] = kept
        config.hook.pytest_deselected(items=left_out)
    # Ranks stay connected between tests of one world.
    by_file = [(path, list(group)) for path, group in itertools.groupby(items, lambda i: i.fspath)]
    items[:] = [item for _, group in by_file for item in sorted(group, key=_world)]


def _world(item):
    asked = item.callspec.params if hasattr(item, "callspec") else {}
    return WORLDS.get(asked.get("where"), 0) or asked.get("world", 0)
