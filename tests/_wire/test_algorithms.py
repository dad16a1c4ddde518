"""Every algorithm of the table is exact, whatever the size would choose, and costs what it says."""

import pytest
import torch

import allgrad as ag
import reference
from allgrad._core.partition import even
from allgrad._wire import across_hosts, algorithms, pairwise, point_to_point
from exactness import check_exact, pieces, same
from traffic import Traffic

ROWS = (2, 0, 3, 1)
EQUAL_ONLY = {"backend", "backend_list"}
CASES = [(op, entry.name) for op, entries in algorithms.TABLE.items() for entry in entries]
EXCHANGES = [entry.name for entry in algorithms.TABLE["all_to_all"]]
SUMS = [entry.name for entry in algorithms.TABLE["all_reduce"]]
CALLS = {
    "all_gather": (lambda x, n: ag.all_gather(x, sizes=n), lambda xs, _: reference.all_gather(xs)),
    "reduce_scatter": (
        lambda x, n: ag.reduce_scatter(x, sizes=n),
        lambda xs, n: reference.reduce_scatter(xs, sizes=n),
    ),
    "all_reduce": (lambda x, _: ag.all_reduce(x), lambda xs, _: reference.all_reduce(xs)),
    "broadcast": (lambda x, _: ag.broadcast(x, 1), lambda xs, _: reference.broadcast(xs, 1)),
    "reduce": (lambda x, _: ag.reduce(x, 1), lambda xs, _: reference.reduce(xs, 1)),
    "all_to_all": (
        lambda x, _: ag.all_to_all(x, send_sizes="equal"),
        lambda xs, _: reference.all_to_all(xs),
    ),
}


@pytest.mark.one_in(8)
@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize(
    ("width", "dtype"),
    [((), torch.float64), ((2, 3), torch.float64), ((3,), torch.complex128)],
    ids=["vectors", "blocks", "complex rows"],
)
@pytest.mark.parametrize(("operation", "algorithm"), CASES)
def test_every_algorithm_is_exact(world, operation, algorithm, width, dtype):
    call, wanted = CALLS[operation]
    ragged = operation in {"all_gather", "reduce_scatter"} and algorithm not in EQUAL_ONLY
    rows = ROWS[:world] if ragged else (2,) * world
    held = {"all_gather": rows, "reduce_scatter": (sum(rows),) * world}
    held |= {"all_to_all": (2 * world,) * world}
    shapes = [(n, *width) for n in held.get(operation, (2,) * world)]
    with algorithms.using(**{operation: algorithm}):
        check_exact(
            lambda x: call(x, list(rows)),
            lambda xs: wanted(xs, list(rows)),
            pieces(shapes, dtype),
        )


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("shape", [(0,), (0, 3), (6, 0)], ids=str)
@pytest.mark.parametrize("algorithm", EXCHANGES)
def test_equal_blocks_may_be_empty(rank, world, shape, algorithm):
    x = torch.empty(shape, requires_grad=True)
    with algorithms.using(all_to_all=algorithm):
        y = ag.all_to_all(x, send_sizes="equal")
        y.sum().backward()
    assert y.shape == x.grad.shape == x.shape


@pytest.mark.ranks(3)
@pytest.mark.parametrize("algorithm", EXCHANGES)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.float16, torch.complex64])
def test_equal_blocks_of_every_kind(rank, world, dtype, algorithm):
    whole = torch.arange(2 * world * world).view(world, 2 * world)
    with algorithms.using(all_to_all=algorithm):
        got = ag.all_to_all((whole[rank] % 5).to(dtype), send_sizes="equal")
    want = (whole.view(world, world, 2)[:, rank].reshape(-1) % 5).to(dtype)
    same(got, want, "the blocks")


@pytest.mark.ranks(3)
@pytest.mark.parametrize("algorithm", SUMS)
@pytest.mark.parametrize("dtype", [torch.int16, torch.float16, torch.complex64])
def test_sums_of_every_kind(rank, world, dtype, algorithm):
    """Backends do not add all of them."""
    xs = [(torch.arange(600_000) % (r + 2)).to(dtype) for r in range(world)]
    with algorithms.using(all_reduce=algorithm):
        got = ag.all_reduce(xs[rank])
    same(got, sum(xs), "the sum")


LONG = 5_500_001  # elements: more chunks than are in flight at once, the last one shorter
LONG_SUMS = {
    "reduce, linear": lambda x: ag.reduce(x, 1),
    "reduce, chunked": lambda x: ag.reduce(x, 1),
    "all_reduce, chunked": ag.all_reduce,
    "all_reduce, chunked, in the nest's own copy": lambda x: torch.cat(
        ag.all_reduce([x[:7], x[7:]])
    ),
    "reduce_scatter, pairwise": ag.reduce_scatter,
}


@pytest.mark.one_in(4)
@pytest.mark.ranks(3)
@pytest.mark.parametrize("seconds", [None, 60], ids=["no deadline", "within a deadline"])
@pytest.mark.parametrize("name", LONG_SUMS)
def test_long_sums_come_in_chunks(rank, world, name, seconds):
    xs = [(torch.arange(LONG) % (17 + r)).float() for r in range(world)]
    assert xs[0].nbytes / world > point_to_point.IN_FLIGHT / (world - 1) > point_to_point.CHUNK
    operation, algorithm, *_ = name.split(", ")
    before = xs[rank].clone()
    with algorithms.using(**{operation: algorithm}), ag.deadline(seconds):
        got = LONG_SUMS[name](xs[rank])
    same(xs[rank], before, "what was passed")
    want = sum(xs)
    if operation == "reduce_scatter":
        want = want.split(even(LONG, world))[rank]
    same(got, want if operation != "reduce" or rank == 1 else torch.zeros(LONG), "the sum")


@pytest.mark.ranks(3)
def test_a_promise_of_equal_blocks_is_not_one_about_what_arrives(rank, world):
    """Sizes that are given are taken as given."""
    x = torch.arange(6.0) + 10 * rank
    got = ag.all_to_all(x, send_sizes="equal", recv_sizes=[2, 2, 2])
    assert got.tolist() == [10 * r + 2 * rank + i for r in range(world) for i in range(2)]


ELEMENTS = 240  # divides by 2, 3, 4, and by one less


@pytest.mark.one_in(4)
@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize(
    ("operation", "algorithm"),
    [
        (op, entry.name)
        for op, entries in algorithms.TABLE.items()
        for entry in entries
        if entry.run.__module__ in {m.__name__ for m in (point_to_point, pairwise, across_hosts)}
    ],
)
def test_costs_are_what_the_busiest_rank_moves(rank, world, operation, algorithm):
    """The formula of an algorithm made of sends and receives is the bytes that it moves."""
    if world == 2 and algorithm == "chunked" and operation != "all_reduce":
        return  # never chosen: one other rank has the only chunk
    call, _ = CALLS[operation]
    rows = [ELEMENTS // world] * world
    held = {"all_gather": rows[rank]}.get(operation, ELEMENTS)
    x = torch.ones(held, dtype=torch.float64)
    with algorithms.using(**{operation: algorithm}), Traffic() as traffic:
        call(x, rows)
    moved = ag.all_reduce(torch.tensor(traffic.sent + traffic.received), "max").item()
    largest = rows[0] if operation in {"all_gather", "reduce_scatter"} else ELEMENTS
    total = ELEMENTS if operation in {"all_gather", "reduce_scatter"} else world * ELEMENTS
    situation = algorithms.Situation(operation, None, True, world, 8 * largest, 8 * total)
    (entry,) = (e for e in algorithms.TABLE[operation] if e.name == algorithm)
    assert entry.cost(situation).nbytes == pytest.approx(moved)
