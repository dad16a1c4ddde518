"""Every collective in one process that holds all pieces: lists of pieces in, lists of results out.

Plain differentiable torch, written from the definitions and sharing no code with the library.
"""

from __future__ import annotations

import torch

STACKED = {
    "sum": lambda t: t.sum(0, dtype=t.dtype),
    "mean": lambda t: t.mean(0),
    "prod": lambda t: t.prod(0, dtype=t.dtype),
    "min": lambda t: t.amin(0),
    "max": lambda t: t.amax(0),
    "logsumexp": lambda t: torch.logsumexp(t, 0),
}
EMPTY = {"sum": 0, "prod": 1, "min": float("inf"), "max": -float("inf"), "logsumexp": -float("inf")}


def at_least_1d(xs):
    return [x.reshape(1) if x.dim() == 0 else x for x in xs]


def all_reduce(xs, op="sum"):
    return [STACKED[op](torch.stack(xs))] * len(xs)


def all_gather(xs, dim=0):
    return [torch.cat(at_least_1d(xs), dim)] * len(xs)


def reduce_scatter(xs, dim=0, op="sum", sizes=None):
    whole = STACKED[op](torch.stack(at_least_1d(xs)))
    return split(whole, len(xs), dim, sizes)


def split(whole, world, dim=0, sizes=None):
    if sizes is None:
        return list(torch.tensor_split(whole, world, dim))
    return list(torch.split(whole, list(sizes), dim))


def all_to_all(xs, dim=0, send=None):
    world = len(xs)
    blocks = [split(x, world, dim, None if send is None else send[r]) for r, x in enumerate(xs)]
    return [torch.cat([blocks[a][b] for a in range(world)], dim) for b in range(world)]


def broadcast(xs, src=0):
    return [xs[src]] * len(xs)


def reduce(xs, dst=0, op="sum"):
    total = STACKED[op](torch.stack(xs))
    return [total if r == dst else torch.zeros_like(x) for r, x in enumerate(xs)]


def gather(xs, dst=0, dim=0):
    whole = torch.cat(at_least_1d(xs), dim)
    return [whole if r == dst else whole.narrow(dim, 0, 0) for r in range(len(xs))]


def scatter(whole, world, dim=0, sizes=None):
    return split(whole.reshape(1) if whole.dim() == 0 else whole, world, dim, sizes)


def permute(xs, pairs):
    source = {b: a for a, b in pairs}
    return [xs[source[r]] if r in source else torch.zeros_like(x) for r, x in enumerate(xs)]


def shift(xs, offset=1, wrap=True):
    world = len(xs)
    pairs = [(r, r + offset) for r in range(world)]
    pairs = [(a, b % world) for a, b in pairs if wrap or 0 <= b < world]
    return permute(xs, pairs)


def scan(xs, op="sum", exclusive=False):
    out = []
    for r, x in enumerate(xs):
        upto = xs[: r if exclusive else r + 1]
        out.append(STACKED[op](torch.stack(upto)) if upto else torch.full_like(x, EMPTY[op]))
    return out
