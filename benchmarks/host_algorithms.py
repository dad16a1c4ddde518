"""Which algorithm is the fastest between hosts, beside the one that the table chooses.

    python benchmarks/host_algorithms.py [--hosts 2 3 4] [--ranks-per-host 1 2 4 8] [--json FILE]
        [--links unlimited 1gbit 200mbit] [--sizes 12KiB 192KiB] [--rounds 5] [--all]
        [--only all_reduce broadcast]

Every operation by every algorithm of ``allgrad/_wire/algorithms.py``, forward, interleaved, in a new
order each round; medians of the slowest rank. An algorithm that is predicted to take ``HOPELESS`` times
as long as the best prediction is left out. Sizes should divide by 384 bytes, so that 2 to 32 ranks can share them. Prints the cells in which another one than the chosen is
faster by more than a tenth (``--all``: every cell), then how many there are. Needs root on Linux: hosts
are network namespaces.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from allgrad._wire import algorithms
from allgrad._wire.hosts import find_topology
from allgrad._wire.link_model import LOOPBACK, host_cores, predict, situation, world
from allgrad._wire.primitives import resolve
from allgrad.cli.bench.calibrate import Cell, time_cells
from allgrad.cli.bench.show import format_bytes, parse_bytes
from allgrad.testing import Hosts

UNLIMITED = "unlimited"
HOPELESS = 4.0
NOISE = 1.1
UNITS = {"mbit": 1e6 / 8, "gbit": 1e9 / 8}


class Place(NamedTuple):
    """Hosts, the ranks of each, and the link between them."""

    hosts: int
    local: int
    link: str

    @property
    def ranks(self) -> int:
        return self.hosts * self.local


def worth_trying(place: Place, nbytes: int, operations: list[str]) -> list[Cell]:
    """Operations at this size, by the algorithms that may win."""
    unit = next((unit for unit in UNITS if place.link.endswith(unit)), None)
    rate = float(place.link.removesuffix(unit)) * UNITS[unit] if unit else None
    links = replace(LOOPBACK, cores=host_cores(), between_bandwidth=rate)
    found = []
    for operation in operations:
        entries = algorithms.TABLE[operation]
        s = situation(operation, place.ranks, nbytes, topology=world(place.ranks, place.local))
        one_each = [e for e in entries if e.name != "two_steps"]
        seconds = {e.name: predict(s, links, e).seconds for e in one_each}
        best = min(seconds.values())
        chosen = algorithms.choose(s).name
        found += [
            Cell(operation, name, nbytes)
            for name, predicted in seconds.items()
            if name == chosen or predicted <= HOPELESS * best
        ]
    return found


def chosen_on_ranks(cells: list[Cell], ranks: int) -> list[str]:
    """Run on a rank: the algorithm that the table has for each cell's call."""
    topology = find_topology(resolve("host_algorithms", None))
    return [
        algorithms.choose(situation(cell.operation, ranks, cell.nbytes, topology=topology)).name
        for cell in cells
    ]


def measure(
    made: Hosts, place: Place, sizes: list[int], operations: list[str], rounds: int
) -> list[dict[str, Any]]:
    """One row for each operation and size: seconds by algorithm, and the chosen one."""
    cells = [cell for nbytes in sizes for cell in worth_trying(place, nbytes, operations)]
    chosen = made.run(chosen_on_ranks, cells, place.ranks)[0]
    by_rank = made.run(time_cells, cells, rounds, timeout=900.0)
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for number, cell in enumerate(cells):
        samples = [max(one) for one in zip(*(rank[number] for rank in by_rank), strict=True)]
        key = cell.operation, cell.nbytes
        row = rows.setdefault(
            key,
            {
                **place._asdict(),
                "operation": cell.operation,
                "bytes": cell.nbytes,
                "chosen": chosen[number],
                "seconds": {},
            },
        )
        row["seconds"][cell.algorithm] = statistics.median(samples)
    return list(rows.values())


def fastest(row: dict[str, Any]) -> str:
    return min(row["seconds"], key=row["seconds"].get)


def ratio(row: dict[str, Any]) -> float:
    """The chosen algorithm's time, of the fastest one's."""
    return row["seconds"][row["chosen"]] / row["seconds"][fastest(row)]


def show(row: dict[str, Any]) -> str:
    times = ", ".join(
        f"{name} {1e3 * seconds:.2f}"
        for name, seconds in sorted(row["seconds"].items(), key=lambda one: one[1])
    )
    place = f"{row['hosts']} x {row['local']}, {row['link']}"
    return (
        f"| {place} | {row['operation']} | {format_bytes(row['bytes'])} | {row['chosen']} "
        f"| {ratio(row):.2f} | {times} |"
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--hosts", type=int, nargs="+", default=[2, 3, 4])
    options.add_argument("--ranks-per-host", type=int, nargs="+", default=[1, 2, 4, 8])
    options.add_argument("--links", nargs="+", default=[UNLIMITED, "1gbit", "200mbit"])
    options.add_argument("--sizes", nargs="+", default=["12KiB", "192KiB"])
    options.add_argument("--only", nargs="+", choices=algorithms.TABLE, default=[*algorithms.TABLE])
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--all", action="store_true")
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    sizes, rows = [parse_bytes(text) for text in given.sizes], []
    print(
        "| hosts, link | operation | bytes | chosen | of the fastest | ms |\n|---|---|---|---|---|---|"
    )
    for hosts in given.hosts:
        for local in given.ranks_per_host:
            with Hosts(hosts, ranks_per_host=local) as made:
                # The unlimited link first: a rate can be changed, and not taken away.
                for link in sorted(given.links, key=UNLIMITED.__ne__):
                    if link != UNLIMITED:
                        made.set_rate(link)
                    place = Place(hosts, local, link)
                    found = measure(made, place, sizes, given.only, given.rounds)
                    rows += found
                    for row in found:
                        if given.all or ratio(row) > NOISE:
                            print(show(row), flush=True)
            if given.json:
                given.json.write_text(json.dumps(rows, indent=1) + "\n")
    good = sum(ratio(row) <= NOISE for row in rows)
    print(f"the chosen algorithm is the fastest, or within a tenth of it: {good} of {len(rows)}")


if __name__ == "__main__":
    main()
