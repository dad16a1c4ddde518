"""Every collective: as one rank calls it, and in one process that holds all pieces."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import allgrad as ag
import reference

if TYPE_CHECKING:
    from collections.abc import Callable

REDUCTIONS = ("sum", "mean", "prod", "min", "max", "logsumexp")
HELD = (2, 1, 3, 2)  # what each rank holds along the ragged dim
SENT = (
    (1, 2, 1, 0),
    (2, 0, 1, 1),
    (0, 1, 2, 1),
    (1, 0, 2, 2),
)  # all_to_all: what each rank sends to each


@dataclass(frozen=True)
class Place:
    """Where a rank calls from, and whether it gives sizes or lets them be found out."""

    rank: int
    world: int
    sizes_given: bool = False
    group: object = None

    @property
    def held(self):
        return HELD[: self.world]

    @property
    def sizes(self):
        return self.held if self.sizes_given else None


@dataclass(frozen=True)
class Call:
    """A collective with its arguments.

    run: what one rank calls, from its place and its piece.
    whole: the same in one process; called by ``results``.
    shapes: what each rank of a world brings.
    kind: "each" rank has a loss of its own; all have the "same", which counts once; all bring
    "alike" values; or there is "none" of the gradient.
    """

    run: Callable
    whole: Callable
    shapes: Callable
    kind: str = "each"

    def results(self, xs, world):
        """All ranks' results, from what they bring."""
        return self.whole(xs, world) if self.kind == "alike" else self.whole(xs)


def square(world):
    return [(2, 2)] * world


def ragged(world):
    return [(2, n) for n in HELD[:world]]


def joined(world):
    return [(2, sum(HELD[:world]))] * world


def kind_of(grad):
    return "each" if grad == "sum" else grad


def all_reduce(op, grad="sum"):
    return Call(
        lambda at, x: ag.all_reduce(x, op, group=at.group, grad=grad),
        lambda xs: reference.all_reduce(xs, op),
        square,
        kind_of(grad),
    )


def all_gather(grad="sum"):
    return Call(
        lambda at, x: ag.all_gather(x, 1, sizes=at.sizes, group=at.group, grad=grad),
        lambda xs: reference.all_gather(xs, 1),
        ragged,
        kind_of(grad),
    )


def reduce_scatter(op):
    return Call(
        lambda at, x: ag.reduce_scatter(x, 1, op, sizes=at.held, group=at.group),
        lambda xs: reference.reduce_scatter(xs, 1, op, HELD[: len(xs)]),
        joined,
    )


def exchanged(at, x):
    send = SENT[at.rank][: at.world]
    receive = [SENT[r][at.rank] for r in range(at.world)] if at.sizes_given else None
    return ag.all_to_all(x, 1, send_sizes=send, recv_sizes=receive, group=at.group)


ALL_TO_ALL = Call(
    exchanged,
    lambda xs: reference.all_to_all(xs, 1, [row[: len(xs)] for row in SENT[: len(xs)]]),
    lambda world: [(2, sum(row[:world])) for row in SENT[:world]],
)


def broadcast(grad="sum"):
    return Call(
        lambda at, x: ag.broadcast(x, 1, group=at.group, grad=grad),
        lambda xs: reference.broadcast(xs, 1),
        square,
        kind_of(grad),
    )


def reduce(op):
    return Call(
        lambda at, x: ag.reduce(x, 1, op, group=at.group),
        lambda xs: reference.reduce(xs, 1, op),
        square,
    )


GATHER = Call(
    lambda at, x: ag.gather(x, 1, 1, sizes=at.sizes, group=at.group),
    lambda xs: reference.gather(xs, 1, 1),
    ragged,
)
SCATTER = Call(
    lambda at, x: ag.scatter(x, 1, 1, sizes=at.held, group=at.group),
    lambda xs: reference.scatter(xs[1], len(xs), 1, HELD[: len(xs)]),
    lambda world: [(2, sum(HELD[:world]) if r == 1 else 0) for r in range(world)],
)
PERMUTE = Call(
    lambda at, x: ag.permute(
        x, [(r, r + 1) for r in range(at.world - 1)], dim=1, sizes=at.sizes, group=at.group
    ),
    lambda xs: reference.permute(xs, [(r, r + 1) for r in range(len(xs) - 1)]),
    ragged,
)
SHIFT = Call(
    lambda at, x: ag.shift(x, 1, dim=1, sizes=at.sizes, group=at.group), reference.shift, ragged
)


def scan(op, *, exclusive=False):
    return Call(
        lambda at, x: ag.scan(x, op, exclusive=exclusive, group=at.group),
        lambda xs: reference.scan(xs, op, exclusive),
        square,
    )


SHARE = Call(
    lambda at, x: ag.share(x, group=at.group),
    lambda xs, world: [xs[0]] * world,
    lambda _: joined(1),
    "alike",
)
SPLIT = Call(
    lambda at, x: ag.split(x, 1, sizes=at.held, group=at.group),
    lambda xs, world: reference.split(xs[0], world, 1, HELD[:world]),
    lambda world: joined(world)[:1],
    "alike",
)


CALLS = {
    **{f"all_reduce {op}": all_reduce(op) for op in REDUCTIONS},
    **{f"all_reduce {op}, same": all_reduce(op, "same") for op in ("sum", "mean", "max")},
    **{f"all_reduce {op}, none": all_reduce(op, "none") for op in ("sum", "prod")},
    "all_gather": all_gather(),
    "all_gather, same": all_gather("same"),
    "all_gather, none": all_gather("none"),
    **{f"reduce_scatter {op}": reduce_scatter(op) for op in REDUCTIONS},
    "all_to_all": ALL_TO_ALL,
    "broadcast": broadcast(),
    "broadcast, same": broadcast("same"),
    "broadcast, none": broadcast("none"),
    **{f"reduce {op}": reduce(op) for op in REDUCTIONS},
    "gather": GATHER,
    "scatter": SCATTER,
    "permute": PERMUTE,
    "shift": SHIFT,
    **{f"scan {op}": scan(op) for op in REDUCTIONS},
    "scan sum, exclusive": scan("sum", exclusive=True),
    "share": SHARE,
    "split": SPLIT,
}

# One of each kind: the other reductions, and those of other collectives, are made of these.
KINDS = (
    *("all_reduce sum", "all_reduce mean", "all_reduce max"),
    *("all_reduce sum, same", "all_reduce sum, none"),
    *("all_gather", "all_gather, same", "reduce_scatter sum", "all_to_all"),
    *("broadcast", "broadcast, same", "reduce sum", "gather", "scatter"),
    *("permute", "shift", "scan sum", "share", "split"),
)

# The suite runs a part of what takes minutes; ALLGRAD_ALL=1 runs all of it.
EVERYTHING = bool(os.environ.get("ALLGRAD_ALL") or os.environ.get("ALLGRAD_STORE_RESULTS"))
ON_THREE_RANKS = tuple(CALLS) if EVERYTHING else KINDS
