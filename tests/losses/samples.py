"""Losses of samples against their formula in one process: values and two derivatives, by rank.

Runs inside a rank. Each argument is a list of pieces by rank, or one value that every rank holds.
"""

import pytest
import torch

import allgrad as ag
from allgrad.losses._rows import recompute
from exactness import place, random
from nn.twins import close, derivatives

COUNTS = {"equal": (3, 3, 3, 3), "ragged": (4, 1, 2, 5), "empty": (3, 0, 4, 2)}


def features(counts, seed, width=5, dtype=torch.float64):
    """Unit vectors of each rank."""
    made = (random((n, width), seed + r) for r, n in enumerate(counts))
    return [torch.nn.functional.normalize(x, dim=1).to(dtype) for x in made]


def ids_of(counts, seed, most=4):
    drawn = torch.Generator().manual_seed(seed)
    return [torch.randint(most, (n,), generator=drawn) for n in counts]


def check_loss(group, run, formula, pieces, numbers, reduction="mean"):
    """``run(own pieces, numbers)`` on each rank against ``formula(pieces of all ranks, numbers)``.

    Each rank's loss is that of all samples, and the objective is the sum of the ranks' losses
    (``"mean"``), or one loss (``"sum"``). Numbers, such as a scale, are held by every rank, which
    gets its part of their gradient.
    """
    rank, world = place(group)
    factor = world if reduction == "mean" else 1
    everyone = [[x.clone().requires_grad_() for x in one] for one in pieces]
    scalars = [x.clone().requires_grad_() for x in numbers]
    want = formula(everyone, scalars)
    own = [one[rank].clone().requires_grad_() for one in pieces]
    mine = [x.clone().requires_grad_() for x in numbers]
    got = run(own, mine)
    close(got, want, "the value")

    flat = [x for one in everyone for x in one]
    want_first = derivatives(factor * want, flat + scalars, graph=True)
    got_first = derivatives(got, own + mine, graph=True)
    kinds, first = len(pieces), len(pieces) * world

    def compare(got, want, what):
        for i in range(kinds):
            close(got[i], want[i * world + rank], f"{what} of input {i}")
        for g, w in zip(got[kinds:], want[first:], strict=True):
            close(ag.all_reduce(g.detach(), group=group), w, f"{what} of a number")

    compare(got_first, want_first, "the gradient")
    with pytest.MonkeyPatch.context() as patch:
        for most in (recompute.KEPT_SCORES, 0):
            patch.setattr(recompute, "KEPT_SCORES", most)
            found = derivatives(run(own, mine), own + mine)
            compare(found, want_first, f"the gradient without a graph, up to {most} scores kept,")
    if reduction == "sum":  # a second loss that differs by rank does not count once
        return
    # Of the numbers, ranks hold parts of the gradient: only what is of their own pieces goes on.
    again = sum((random(w.shape, 60 + i) * w.sin()).sum() for i, w in enumerate(want_first[:first]))
    want_second = derivatives(again, flat + scalars)
    ours = sum(
        (random(g.shape, 60 + i * world + rank) * g.sin()).sum()
        for i, g in enumerate(got_first[:kinds])
    )
    compare(derivatives(ours, own + mine), want_second, "the second derivative")
