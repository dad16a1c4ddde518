"""A layer on real ranks against its plain twin in one process: outputs and two derivatives.

Runs inside a rank. Each rank makes all ranks' inputs, and holds its own part of the twin's results
against what it got. The objective is the sum of all ranks' losses, which differ.
"""

from __future__ import annotations

import torch

import allgrad as ag
from exactness import leaf, loss, place, random

TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}
LENGTHS = {"equal": (3, 3, 3, 3), "ragged": (3, 1, 4, 2), "empty": (3, 0, 4, 2)}


def close(got, want, what):
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
    torch.testing.assert_close(
        got.detach(), want.detach(), **TOLERANCE, msg=lambda m: f"{what} is not exact.\n{m}"
    )


def derivatives(total, leaves, graph=False):
    return list(
        torch.autograd.grad(
            total, leaves, create_graph=graph, allow_unused=True, materialize_grads=True
        )
    )


def pieces_of(world, kind, shape, dim, seed=0):
    """Each rank's piece of a random tensor."""
    lengths = LENGTHS[kind][:world]
    full = list(shape)
    full[dim] = sum(lengths)
    return [p.clone() for p in random(full, seed).split(lengths, dim)]


def check_twin(run, whole, inputs, parameters=(), *, group=None, orders=2):
    """``run(inputs of this rank, parameters)`` against ``whole(inputs of all, parameters)``.

    ``inputs`` are tuples of tensors by rank. Every rank holds the same parameters; the sum of
    their gradients over ranks must be the twin's.
    """
    rank, world = place(group)
    everyone = [[leaf(x) for x in one] for one in inputs]
    ps = [leaf(p) for p in parameters]
    wanted = whole(everyone, ps)
    flat = [x for one in everyone for x in one]
    total = sum(loss(y, r) for r, y in enumerate(wanted))
    want_first = derivatives(total, flat + ps, graph=orders > 1)
    width = len(inputs[0])
    mine = slice(rank * width, (rank + 1) * width)

    xs = [leaf(x) for x in inputs[rank]]
    qs = [leaf(p) for p in parameters]
    y = run(xs, qs)
    assert y.requires_grad
    close(y, wanted[rank], "the output")
    first = derivatives(loss(y, rank), xs + qs, graph=orders > 1)
    # autograd.grad visits only what leads to the parameters: on a rank that does not use one, too.
    parts = [g + 0 * q for g, q in zip(first[width:], qs, strict=True)]
    summed = ag.all_reduce(parts, group=group) if parts else []
    for got, want in zip(first[:width], want_first[mine], strict=True):
        close(got, want, "the gradient of an input")
    for got, want in zip(summed, want_first[len(flat) :], strict=True):
        close(got, want, "the gradient of a parameter")
    if orders == 1:
        return

    by_rank = [want_first[r * width : (r + 1) * width] for r in range(world)]
    again = sum(
        sum(loss(g, 50 + r) for g in [*by_rank[r], *want_first[len(flat) :]]) for r in range(world)
    )
    want_second = derivatives(again, flat + ps)
    second = derivatives(sum(loss(g, 50 + rank) for g in [*first[:width], *summed]), xs + qs)
    for got, want in zip(second[:width], want_second[mine], strict=True):
        close(got, want, "the second derivative of an input")
    for got, want in zip(second[width:], want_second[len(flat) :], strict=True):
        close(ag.all_reduce(got, group=group), want, "the second derivative of a parameter")


def each(group, body, cases):
    """All cases in one world: starting one takes longer than most of them."""
    for case in cases:
        body(group, *case)


def assign(module, names, values):
    """Call the module with these tensors as parameters."""
    return lambda *args, **options: torch.func.functional_call(
        module, dict(zip(names, values, strict=True)), args, options
    )
