"""The model of a call's time: prices are found again, and it points in the direction of what is measured."""

import dataclasses
import json
import runpy
from pathlib import Path

import pytest

from allgrad._wire import algorithms, link_model
from allgrad._wire.groups import Backend
from allgrad._wire.link_model import LOOPBACK, Links, fit, predict, seconds, situation, world
from allgrad.cli.bench import calibrate
from allgrad.errors import InputError


def test_prices_that_explain_the_times_are_found_again():
    rows = []
    for ranks in (2, 4):
        for cell in calibrate.cells((16 << 10, 1 << 20)):
            s = situation(cell.operation, ranks, cell.nbytes)
            (entry,) = (e for e in algorithms.TABLE[cell.operation] if e.name == cell.algorithm)
            rows.append((entry.cost(s), s, seconds(entry.cost(s), s, LOOPBACK)))
    found = fit(rows, 2, LOOPBACK.about)
    for field in dataclasses.fields(Links):
        want = getattr(LOOPBACK, field.name)
        assert getattr(found, field.name) == (
            pytest.approx(want, rel=1e-6) if isinstance(want, float) else want
        )


def test_slower_by_the_model_is_slower_by_the_clock():
    """By a factor of seven in benchmarks/results/plan.json."""
    names, s = ("exchange", "backend_list"), situation("reduce_scatter", 4, 4096)
    entries = {e.name: e for e in algorithms.TABLE["reduce_scatter"]}
    fast, slow = (predict(s, LOOPBACK, entries[name]).seconds for name in names)
    assert fast < slow
    cells = [calibrate.Cell("reduce_scatter", name, 4096) for name in names]
    fast, slow = calibrate.measure(4, cells, 3)
    assert fast.low < slow.low


def test_the_stored_measurements_are_met():
    """With the formulas of today: the order of algorithms, and times within a factor of two."""
    root = Path(__file__).parent.parent.parent / "benchmarks"
    compare = runpy.run_path(str(root / "plan.py"))["compare"]
    stored = json.loads((root / "results" / "plan.json").read_text())
    timed = [
        calibrate.Timed(
            c["ranks"],
            calibrate.Cell(c["operation"], c["algorithm"], c["bytes"]),
            *(c[name] for name in ("measured", "low", "high")),
        )
        for c in stored["cells"]
    ]
    found = compare(timed, Links(**stored["links"]))
    for name, least in (("order", 0.9), ("within_2x", 0.8)):
        good, count = found[name]
        assert count > 200
        assert good >= least * count, name


def test_ranks_that_share_cores_take_longer():
    s = situation("all_gather", 8, 1 << 20)
    crowded, alone = (predict(s, dataclasses.replace(LOOPBACK, cores=n)).seconds for n in (2, 8))
    assert crowded > 3 * alone


def test_a_slow_link_between_hosts_decides():
    topology = world(8, 4)
    s = situation("all_gather", 8, 1 << 20, topology=topology)
    slow = dataclasses.replace(LOOPBACK, between_bandwidth=25e6, between_latency=1e-3)
    flat = next(e for e in algorithms.TABLE["all_gather"] if e.name == "pairwise")
    chosen = predict(s, slow)
    assert chosen.algorithm == "across_hosts"
    assert chosen.seconds == pytest.approx(
        4 * (1 << 20) / 25e6, rel=0.03
    )  # 4 in, and 4 out meanwhile
    assert predict(s, slow, flat).seconds > 3 * chosen.seconds


def test_nccl_takes_its_own_call():
    s = situation("all_gather", 1024, 4096, backend=Backend.NCCL, topology=world(1024, 8))
    assert predict(s, LOOPBACK).algorithm == "backend"
    assert s.hosts == 128


def test_a_table_is_written_and_read(tmp_path):
    path = tmp_path / "links.json"
    LOOPBACK.write(path)
    assert Links.read(path) == LOOPBACK


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"overhead": 1}', None, LOOPBACK.about], ids=lambda t: f"{t!r}"
)
def test_what_is_no_table_raises(tmp_path, text):
    path = tmp_path / "links.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match="no table of links"):
        Links.read(path)


def test_a_negative_bandwidth_raises(tmp_path):
    path = tmp_path / "links.json"
    dataclasses.replace(LOOPBACK, bandwidth=-1.0).write(path)
    with pytest.raises(InputError, match="bandwidth must be positive"):
        Links.read(path)
    assert link_model.host_cores() >= 1
