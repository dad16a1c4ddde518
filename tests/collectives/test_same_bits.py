"""Results have the same bits on every rank and from run to run, whatever the algorithm."""

import pytest
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


@pytest.mark.parametrize(("op", "algorithm", "rows"), CASES)
def test_bits_are_the_same_from_run_to_run_and_on_every_rank(op, algorithm, rows):
    for world in (2, 3):
        first = run_ranks(results, world, op, algorithm, rows)
        run_ranks(results, 4, op, algorithm, rows)
        again = run_ranks(
            results, world, op, algorithm, rows
        )  # another world, with other connections
        assert first[0][0][0].any()
        for rank in range(world):
            y, g = first[rank][0]
            for other_y, other_g in [*first[rank], *again[rank]]:
                assert torch.equal(other_y, y)
                assert torch.equal(other_g, g)
            if op in {"all_gather", "all_reduce", "broadcast"}:
                assert torch.equal(y, first[0][0][0])
            if op in {"all_reduce", "reduce_scatter", "reduce"}:  # gradients for all alike
                assert torch.equal(g, first[0][0][1])
