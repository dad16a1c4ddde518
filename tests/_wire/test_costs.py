"""What a call costs: messages and bytes by formula, and allocations.

The formulas stand in docs/performance.md. Bytes are those that one rank hands to the backend for
other ranks, and gets from it; a broadcast's are handed over once.
"""

import math
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import allgrad as ag
from allgrad._core.partition import even
from allgrad._wire import algorithms, point_to_point, situation
from allgrad._wire.calls import resolve
from allgrad._wire.groups import Backend
from allgrad._wire.hosts import find_topology
from allgrad._wire.topology import ONE_HOST, Topology
from allgrad.errors import InputError
from traffic import Traffic

ROW = 256  # bytes
EXCHANGE = 96 * 8  # bytes of each rank's row, when sizes are found out


def peer_to_peer(sends, receives, sent, received):
    calls = {"isend": sends, "irecv": receives}
    return {name: count for name, count in calls.items() if count}, sent, received


def through_root(given, got, r):
    """Rank ``r`` gives and gets so many bytes; rank 0 receives and sends for all of them."""
    if r:
        return peer_to_peer(bool(given[r]), bool(got[r]), given[r], got[r])
    given, got = given[1:], got[1:]
    return peer_to_peer(sum(1 for n in got if n), sum(1 for n in given if n), sum(got), sum(given))


def chunks(n):
    """How many messages a piece is that others add to theirs."""
    return math.ceil(n / point_to_point.CHUNK)


def even_chunks(n, ranks):
    return [4 * count for count in even(n // 4, ranks)]


def star_total():
    return situation.STAR_TOTAL_CROWDED if here().crowded else situation.STAR_TOTAL


def all_gather(n, r):
    """``n`` are the bytes of each rank's piece, ``r`` is this rank."""
    world = len(n)
    if sum(n) <= star_total() and world > 2:
        return through_root(n, [sum(n)] * world, r)
    return all_gather_pairwise(n, r)


def all_gather_pairwise(n, r):
    to, coming = len(n) - 1, sum(1 for rank, size in enumerate(n) if size and rank != r)
    return peer_to_peer(to * bool(n[r]), coming, to * n[r], sum(n) - n[r])


def reduce_scatter(n, r):
    world = len(n)
    if sum(n) <= star_total() and world > 2:
        return through_root([sum(n)] * world, n, r)
    return reduce_scatter_pairwise(n, r)


def reduce_scatter_pairwise(n, r):
    world, others = len(n), sum(n) - n[r]
    sends = sum(chunks(size) for rank, size in enumerate(n) if rank != r)
    return peer_to_peer(sends, (world - 1) * chunks(n[r]), others, (world - 1) * n[r])


def all_reduce(n, r):
    limit = situation.STAR_SUM_OF_TWO
    if len(n) > 2:
        limit = situation.STAR_SUM_CROWDED if here().crowded else situation.STAR_SUM
    if n[r] <= limit:
        return through_root(n, n, r)
    chunk = even_chunks(n[r], len(n))
    there, back = reduce_scatter_pairwise(chunk, r), all_gather_pairwise(chunk, r)
    return Counter(there[0]) + Counter(back[0]), there[1] + back[1], there[2] + back[2]


def broadcast(n, r):
    """From rank 1."""
    n, others = n[r], len(n) - 1
    if others == 1 or (others + 1) * n <= situation.LINEAR_TOTAL:
        return ({"isend": others}, others * n, 0) if r == 1 else ({"irecv": 1}, 0, n)
    if r == 1:
        return {"isend": others}, n, 0
    return peer_to_peer(others - 1, others, (others - 1) * even_chunks(n, others)[max(0, r - 1)], n)


def reduce(n, r):
    """To rank 1."""
    n, others = n[r], len(n) - 1
    if others == 1 or (others + 1) * n <= situation.LINEAR_TOTAL:
        calls = {"irecv": others * chunks(n)} if r == 1 else {"isend": chunks(n)}
        return calls, *((0, others * n) if r == 1 else (n, 0))
    if r == 1:
        return {"irecv": others}, 0, n
    calls, _, received = reduce_scatter_pairwise(even_chunks(n, others), max(0, r - 1))
    return Counter(calls) + Counter({"isend": 1}), n, received


def gather(n, r):
    """To rank 1. A block without rows travels as one byte."""
    blocks = [max(1, size) for size in n]
    if r == 1:
        return {"irecv": len(n) - 1}, 0, sum(blocks) - blocks[r]
    return {"isend": 1}, blocks[r], 0


def scatter(n, r):
    calls, sent, received = gather(n, r)
    other = {"isend": "irecv", "irecv": "isend"}
    return {other[name]: count for name, count in calls.items()}, received, sent


def shift(n, r):
    return {"isend": 1, "irecv": 1}, max(1, n[r]), max(1, n[r - 1])


def shift_back(n, r):
    return {"isend": 1, "irecv": 1}, max(1, n[r - 1]), max(1, n[r])


def all_to_all(n, r):
    """Every rank cuts a piece of ``n[r]`` rows for each other; here all have the same."""
    others = n[r] // len(n) * (len(n) - 1)
    small = len(n) * n[r] <= situation.STAR_EXCHANGE_CROWDED
    if len(n) == 2 or not small or not here().crowded:
        return peer_to_peer(len(n) - 1, len(n) - 1, others, others)
    return through_root(n, n, r)


def scan(n, r):
    """By doubling the distance: what has a rank that far ahead, or behind, to go to."""
    distances = [2**k for k in range(math.ceil(math.log2(len(n))))]
    sends, receives = (
        sum(map(ahead, distances)) for ahead in (lambda d: r + d < len(n), lambda d: r >= d)
    )
    return peer_to_peer(sends, receives, sends * n[r], receives * n[r])


def scan_back(n, r):
    return scan(n, len(n) - 1 - r)


def nothing(n, r):
    return {}, 0, 0


def held(rows, rank):
    return torch.ones(rows[rank], ROW // 4, requires_grad=True)


def whole(rows, _):
    return torch.ones(sum(rows), ROW // 4, requires_grad=True)


RAGGED = {
    "all_gather": (held, lambda x, n: ag.all_gather(x, sizes=n), all_gather, reduce_scatter),
    "all_gather, same": (
        held,
        lambda x, n: ag.all_gather(x, sizes=n, grad="same"),
        all_gather,
        nothing,
    ),
    "reduce_scatter": (
        whole,
        lambda x, n: ag.reduce_scatter(x, sizes=n),
        reduce_scatter,
        all_gather,
    ),
    "split": (whole, lambda x, n: ag.split(x, sizes=n), nothing, all_gather),
    "gather": (held, lambda x, n: ag.gather(x, 1, sizes=n), gather, scatter),
    "shift": (held, lambda x, n: ag.shift(x, sizes=n), shift, shift_back),
}
EQUAL = {
    "all_reduce": (held, lambda x, _: ag.all_reduce(x), all_reduce, all_reduce),
    "all_reduce, same": (held, lambda x, _: ag.all_reduce(x, grad="same"), all_reduce, nothing),
    "share": (held, lambda x, _: ag.share(x), nothing, all_reduce),
    "broadcast": (held, lambda x, _: ag.broadcast(x, 1), broadcast, reduce),
    "reduce": (held, lambda x, _: ag.reduce(x, 1), reduce, broadcast),
    "all_to_all": (
        held,
        lambda x, _: ag.all_to_all(x, send_sizes="equal"),
        all_to_all,
        all_to_all,
    ),
    "scan": (held, lambda x, _: ag.scan(x), scan, scan_back),
}


SIZES = {"small": 1, "medium": 10, "large": 4096}


def rows_by_rank(world, size, ragged):
    """A few rows, or more than what the table calls small, or than what it calls medium."""
    rows, scale = ((2, 1, 3, 0), 1) if ragged else ((12,) * 4, 1 / 8 if size == "large" else 1)
    return tuple(int(scale * SIZES[size]) * count for count in rows[:world])


@pytest.mark.one_in(7)
@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("name", "ragged"), [*((n, True) for n in RAGGED), *((n, False) for n in [*RAGGED, *EQUAL])]
)
def test_messages_and_bytes_follow_the_formulas(rank, world, name, ragged, size):
    make, call, forward, backward = (RAGGED | EQUAL)[name]
    rows = rows_by_rank(world, size, ragged)
    n = [ROW * count for count in rows]
    x = make(rows, rank)
    forget_exchanges()
    with Traffic() as there:
        y = call(x, rows)
    with Traffic() as back:
        y.backward(torch.ones_like(y))
    assert there == forward(n, rank)
    assert back == backward(n, rank)


def forget_exchanges():
    """Of earlier tests in these processes: those that repeat them go by the backend."""
    group = resolve("here", None).group
    group.last_exchange = None
    group.successors.clear()


def chosen(operation, n):
    """The algorithm for pieces (or blocks of the result) of so many bytes by rank, over Gloo."""
    counted = operation in {"all_gather", "reduce_scatter"}
    total = sum(n) if counted else len(n) * n[0]
    equal = len(set(n)) == 1
    about = operation, Backend.GLOO, True, len(n), max(n), total, equal
    return algorithms.choose(algorithms.Situation(*about, topology=here())).name


def here():
    """Where the ranks of this test are; in the test's own process nothing is known."""
    return find_topology(resolve("here", None)) if dist.is_initialized() else ONE_HOST


def test_sizes_reach_every_algorithm():
    """The sizes above are on all sides of the table's limits."""
    found = {operation: set() for operation in algorithms.TABLE}
    for world in (2, 3, 4):
        for size in SIZES:
            for ragged in (False, True):
                n = [ROW * count for count in rows_by_rank(world, size, ragged)]
                for name in ("all_gather", "reduce_scatter"):
                    found[name].add(chosen(name, n))
                for name in ("all_reduce", "all_to_all", "broadcast", "reduce"):
                    if not ragged:
                        found[name].add(chosen(name, n))
    assert found == {
        "all_gather": {"star", "pairwise"},
        "reduce_scatter": {"star", "pairwise_stacked", "pairwise"},
        "all_reduce": {"star", "chunked"},
        "all_to_all": {"star", "pairwise", "repeated"},
        "broadcast": {"linear", "chunked"},
        "reduce": {"linear", "chunked"},
    }


def test_with_a_core_for_each_rank_a_large_exchange_is_pairwise_with_receives_first():
    free = Topology(((0, 1, 2, 3),), ("a",), (1, 2, 3, 4), crowded=False)
    for nbytes, name in ((1 << 12, "pairwise"), (1 << 18, "receives_first")):
        about = "all_to_all", Backend.GLOO, True, 4, nbytes, 4 * nbytes
        assert algorithms.choose(algorithms.Situation(*about, topology=free)).name == name


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "gather", "shift", "all_to_all"])
def test_only_sizes_found_out_cost_an_exchange(rank, world, name):
    rows = (12,) * world
    x = whole(rows, rank) if name == "reduce_scatter" else held(rows, rank)
    call = getattr(ag, name)
    promise = {"send_sizes" if name == "all_to_all" else "sizes": "equal"}
    with Traffic() as given:
        call(x, **promise)
    with Traffic() as found:
        call(x)
    calls, sent, received = exchange(world, rank)
    if name == "all_to_all":  # whose blocks need not have one size then
        others = world - 1
        assert found.calls == Counter({"isend": others, "irecv": others}) + Counter(calls)
        return
    assert found.calls == given.calls + Counter(calls)
    assert found.sent == given.sent + sent
    assert found.received == given.received + received


def exchange(world, rank):
    """What finding sizes out costs: an all_gather of one row."""
    return all_gather([EXCHANGE] * world, rank)


@pytest.mark.ranks(3)
def test_a_nest_finds_its_sizes_out_in_one_exchange(rank, world):
    xs = [torch.ones(rank + 1, ROW // 4) for _ in range(8)]
    with Traffic() as nest:
        ag.all_gather(xs)
    calls, sent, received = exchange(world, rank)
    pieces = all_gather([8 * ROW * (r + 1) for r in range(world)], rank)
    assert nest == (Counter(calls) + Counter(pieces[0]), sent + pieces[1], received + pieces[2])


class Allocations(TorchDispatchMode):
    """Bytes of every new piece of memory that an operation makes, above a few hundred."""

    def __init__(self):
        super().__init__()
        self.nbytes, self.alive = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {self.place(x) for x in [*tree_leaves((args, kwargs)), *self.alive]}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if (
                isinstance(x, torch.Tensor)
                and self.place(x) not in known
                and x.untyped_storage().nbytes() >= ROW
            ):
                known.add(self.place(x))
                self.alive.append(x)  # kept, so that no other one gets the same address
                self.nbytes.append(x.untyped_storage().nbytes())
        return out

    def place(self, x):
        return x.untyped_storage().data_ptr() if isinstance(x, torch.Tensor) else None


def allocated(call, x, rows):
    find_topology(resolve("allocated", None))  # what a group finds out once is not counted
    with Allocations() as there:
        y = call(x, rows)
    g = torch.ones_like(y)
    with Allocations() as back:
        torch.autograd.grad(y, x, g)
    return there.nbytes, back.nbytes


@pytest.mark.ranks(3)
@pytest.mark.parametrize("ragged", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_memory_is_taken_for_the_result_alone_where_pieces_are_large(rank, world, size, ragged):
    rows = rows_by_rank(world, size, ragged)
    total, own = sum(rows) * ROW, rows[rank] * ROW
    chunk = min(own, point_to_point.CHUNK)
    coming = min((world - 1) * chunks(own), point_to_point.IN_FLIGHT // chunk) * chunk  # at once
    summing = {
        "star": [own] if rank else [world * total, total, own],  # the root has every rank's whole
        "pairwise_stacked": [world * own, own],
        "pairwise": [own, coming],
    }[chosen("reduce_scatter", [ROW * count for count in rows])]
    there, back = allocated(RAGGED["all_gather"][1], held(rows, rank), rows)
    assert there == [total]
    assert back == summing
    there, back = allocated(RAGGED["reduce_scatter"][1], whole(rows, rank), rows)
    assert there == summing
    assert back == [total]


@pytest.mark.ranks(3)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "all_to_all"])
def test_little_memory_beside_the_result(rank, world, name, size):
    rows = rows_by_rank(world, size, ragged=False)
    there, back = allocated(EQUAL[name][1], held(rows, rank), rows)
    own = rows[rank] * ROW
    algorithm = chosen(name, [own] * world)
    if name == "broadcast":
        chunk = own // (world - 1)
        alone, adding = algorithm == "chunked", [chunk, (world - 2) * chunk, own]
        assert there == [own]
        assert rank == 1 or back == (adding if alone else [own])  # zeros last
        assert rank != 1 or back == ([own] if alone else [own, (world - 1) * own])
        return
    want = [own]
    if algorithm == "chunked":
        want = [own, (world - 1) * even_chunks(own, world)[rank]]
    if algorithm == "star" and rank == 0:  # which has every rank's pieces, and the result
        want = [world * own, own] if name == "all_reduce" else [own, world * own, world * own]
    assert there == back == want


@pytest.mark.ranks(3)
def test_another_dim_costs_one_copy(rank, world):
    columns = torch.ones(ROW, rows_by_rank(world, "large", True)[rank] // 4, requires_grad=True)
    there, _ = allocated(lambda x, _: ag.all_gather(x, 1), columns, None)
    large = [n for n in there if n > EXCHANGE * world]
    assert len(large) == 2  # what comes in, and the joined pieces
    assert large[0] == large[1]


@pytest.mark.ranks(3)
def test_an_algorithm_can_be_forced_for_experiments(rank):
    x = torch.ones(4)
    with Traffic() as traffic, algorithms.using(all_gather="broadcasts"):
        ag.all_gather(x, sizes="equal")
        with algorithms.using(all_gather="backend"):
            ag.all_gather(x, sizes="equal")
        ag.all_gather(x, sizes="equal")
    assert traffic.calls == {"broadcast": 6, "all_gather_into_tensor": 1}
    with Traffic() as traffic:
        ag.all_gather(x, sizes="equal")
    assert traffic == through_root([16] * 3, [48] * 3, rank)
    for wrong in ({"all_gather": "pigeons"}, {"scan": "backend"}):
        with pytest.raises(InputError, match="has no algorithm"), algorithms.using(**wrong):
            pass


@pytest.mark.ranks(3)
@pytest.mark.parametrize("size", SIZES)
def test_messages_do_not_meet_those_of_the_caller(rank, world, size):
    """What the caller has begun to send and receive itself is still under way."""
    rows = rows_by_rank(world, size, ragged=False)
    x = torch.full((rows[rank], ROW // 4), 1.0 + rank)
    theirs = [torch.empty_like(x) for _ in range(world)]
    works = [dist.irecv(theirs[r], r) for r in range(world) if r != rank]
    assert (ag.all_reduce(x) == 6).all()
    assert (ag.broadcast(x, 1) == 2).all()
    assert ag.all_gather(x, sizes="equal")[:: rows[0], 0].tolist() == [1, 2, 3]
    assert (ag.reduce_scatter(x, sizes="equal") == 6).all()
    works += [dist.isend(x * 10, r) for r in range(world) if r != rank]
    for work in works:
        work.wait()
    assert all((theirs[r] == 10 * (r + 1)).all() for r in range(world) if r != rank)
