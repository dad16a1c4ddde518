"""Results have the same bits on every rank and from run to run, whatever the algorithm."""

import itertools

import torch
import torch.distributed as dist

import allgrad as ag
from allgrad._wire import algorithms
from allgrad.testing import run_ranks


def wild(rank, rows=12):
    """Numbers of very different sizes: adding them in another order gives other bits."""
    source = torch.Generator().manual_seed(rank)
    powers = torch.randint(-12, 12, (rows, 64), generator=source)
    return torch.randn(rows, 64, generator=source) * 2.0**powers


def results(op, algorithm, rows):
    """Results and gradients as bits, of three calls each, with the algorithm forced."""
    rank, world = dist.get_rank(), dist.get_world_size()
    got = []
    with algorithms.using(**({} if algorithm is None else {op: algorithm})):
        for _ in range(3):
            x = wild(rank, rows * world if op == "reduce_scatter" else rows).requires_grad_()
            call = getattr(ag, op)
            promised = {"all_to_all": {"send_sizes": "equal"}}.get(op, {"sizes": "equal"})
            y = call(x) if op in {"all_reduce", "broadcast", "reduce"} else call(x, **promised)
            (g,) = torch.autograd.grad(y, x, wild(rank + 10, y.shape[0]))
            got.append((y.detach().view(torch.int32), g.view(torch.int32)))
    return got


CASES = [
    *((op, entry.name, 12) for op, entries in algorithms.TABLE.items() for entry in entries),
    *((op, None, rows) for op in ("all_reduce", "broadcast") for rows in (1, 12, 8 * 1024)),
]


def results_of_all():
    return [results(*case) for case in CASES]


def test_bits_are_the_same_from_run_to_run_and_on_every_rank():
    first = {world: run_ranks(results_of_all, world) for world in (2, 3)}
    run_ranks(results_of_all, 4)
    again = {world: run_ranks(results_of_all, world) for world in (2, 3)}  # other connections
    for world, number in itertools.product(first, range(len(CASES))):
        check_bits(
            [first[world][rank][number] for rank in range(world)],
            [again[world][rank][number] for rank in range(world)],
            CASES[number],
        )


def check_bits(first, again, case):
    op = case[0]
    first_y, first_g = first[0][0]
    assert first_y.any(), case
    for here, later in zip(first, again, strict=True):
        y, g = here[0]
        for other_y, other_g in [*here, *later]:
            assert torch.equal(other_y, y), case
            assert torch.equal(other_g, g), case
        if op in {"all_gather", "all_reduce", "broadcast"}:
            assert torch.equal(y, first_y), case
        if op in {"all_reduce", "reduce_scatter", "reduce"}:  # gradients for all alike
            assert torch.equal(g, first_g), case
