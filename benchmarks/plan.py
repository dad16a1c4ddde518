"""What ``allgrad plan`` predicts beside what is measured: times, and the order of algorithms.

    python benchmarks/plan.py [--rounds 9] [--store]

Calibrates first (every algorithm, 16 KiB and 1 MiB, 2 and 4 ranks), then measures every algorithm at
other sizes, in the same run. ``--store`` writes benchmarks/results/plan.json, from which
docs/generate.py makes the table of docs/plan.md. On a busy machine, wake-ups of ranks are measured
instead of calls: ``chrt -r 1 python benchmarks/plan.py`` gives the ranks the processor at once.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from allgrad._wire import algorithms
from allgrad._wire.link_model import Links, predict, situation
from allgrad.cli.bench import calibrate

if TYPE_CHECKING:
    from collections.abc import Sequence

SIZES = (4 << 10, 64 << 10, 256 << 10, 4 << 20)
NOISE = 1.1  # times that differ by less have no order
RESULTS = Path(__file__).parent / "results" / "plan.json"


def compare(measured: Sequence[calibrate.Timed], links: Links) -> dict[str, Any]:
    """Cells with both times; how many are within a factor of two; pairs in the right order."""
    rows: list[dict[str, Any]] = []
    for timed in measured:
        operation, name, nbytes = timed.cell
        (entry,) = (e for e in algorithms.TABLE[operation] if e.name == name)
        predicted = predict(situation(operation, timed.ranks, nbytes), links, entry).seconds
        about: dict[str, Any] = {
            "ranks": timed.ranks,
            "operation": operation,
            "algorithm": name,
            "bytes": nbytes,
        }
        times = {"measured": timed.median, "low": timed.low, "high": timed.high}
        rows.append(about | times | {"predicted": predicted})
    within = sum(0.5 <= row["predicted"] / row["measured"] <= 2 for row in rows)
    right = [
        (a["measured"] < b["measured"]) == (a["predicted"] < b["predicted"])
        for a, b in combinations(rows, 2)
        if _has_order(a, b)
    ]
    return {
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "links": asdict(links),
        "within_2x": [within, len(rows)],
        "order": [sum(right), len(right)],
        "cells": rows,
    }


def _has_order(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Two algorithms for one call, whose times differ by more than the noise of this run."""
    alike = all(a[name] == b[name] for name in ("ranks", "operation", "bytes"))
    first, second = sorted((a, b), key=lambda row: row["measured"])
    apart = second["measured"] > NOISE * first["measured"] and second["low"] > first["high"]
    return alike and apart


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--store", action="store_true")
    options.add_argument("--out", type=Path, default=RESULTS)
    given = options.parse_args()
    found = f"Gloo over loopback, {os.cpu_count()} cores, torch {torch.__version__}"
    links = calibrate.calibrate(found, given.rounds)
    measured = [
        timed
        for world in calibrate.WORLDS
        for timed in calibrate.measure(world, calibrate.cells(SIZES), given.rounds)
    ]
    compared = compare(measured, links)
    for row in compared["cells"]:
        times = f"{1e6 * row['measured']:8.0f} {1e6 * row['predicted']:8.0f} us"
        ratio = f"{row['predicted'] / row['measured']:5.2f}"
        name = f"{row['ranks']} {row['operation']:15}{row['algorithm']:18}{row['bytes']:8}"
        print(name, times, ratio)
    print(json.dumps(compared["links"], indent=1))
    for name in ("within_2x", "order"):
        good, count = compared[name]
        print(f"{name}: {good} of {count}, {100 * good / count:.0f} %")
    if given.store:
        given.out.write_text(json.dumps(compared, indent=1) + "\n")


if __name__ == "__main__":
    main()
