"""Algorithms across hosts: exact, the same bits on every rank, and no byte crosses a link twice.

``ALLGRAD_HOST`` puts the ranks of one machine on several hosts.
"""

import contextlib
import os
import sys

import pytest
import torch
import torch.distributed as dist

import allgrad as ag
import reference
from allgrad._wire import across_hosts, algorithms
from allgrad._wire.groups import Backend, find_group
from allgrad._wire.topology import Topology
from exactness import check_exact, pieces
from traffic import Traffic

OPERATIONS = [
    operation
    for operation, entries in algorithms.TABLE.items()
    if any(entry.run.__module__ == across_hosts.__name__ for entry in entries)
]
LAYOUTS = ("aabb", "abab", "abbb", "abca", "abcd")  # the host of each rank
ROWS = (2, 0, 3, 1)
SENT = ((1, 2, 0, 3), (0, 0, 0, 0), (3, 0, 0, 0), (1, 1, 1, 1))  # by sender and receiver


def group_on(layout):
    """A group whose ranks are on these hosts."""
    before = os.environ.get("ALLGRAD_HOST")
    os.environ["ALLGRAD_HOST"] = layout[dist.get_rank()]
    try:
        group = dist.new_group()
        ag.all_reduce(torch.ones(1), group=group)
    finally:
        os.environ.pop("ALLGRAD_HOST")
        if before is not None:
            os.environ["ALLGRAD_HOST"] = before
    assert len(find_group("test", group).topology.hosts) == len(set(layout))
    return group


OTHERS = {"all_gather": "ring", "broadcast": "scattered", "reduce": "scattered"}


@contextlib.contextmanager
def forced(segment=across_hosts.SEGMENT, others=False):
    before, across_hosts.SEGMENT = across_hosts.SEGMENT, segment
    try:
        names = dict.fromkeys(OPERATIONS, "across_hosts") | (OTHERS if others else {})
        with algorithms.using(**names):
            yield
    finally:
        across_hosts.SEGMENT = before


CALLS = {
    "all_gather": (
        ROWS,
        lambda x, g: ag.all_gather(x, sizes=ROWS, group=g),
        reference.all_gather,
    ),
    "reduce_scatter": (
        (6,) * 4,
        lambda x, g: ag.reduce_scatter(x, sizes=ROWS, group=g),
        lambda xs: reference.reduce_scatter(xs, sizes=list(ROWS)),
    ),
    "all_reduce": ((5,) * 4, lambda x, g: ag.all_reduce(x, group=g), reference.all_reduce),
    "all_to_all": (
        (6, 0, 3, 4),
        lambda x, g: ag.all_to_all(x, send_sizes=SENT[dist.get_rank()], group=g),
        lambda xs: reference.all_to_all(xs, send=SENT),
    ),
    "broadcast": (
        (5,) * 4,
        lambda x, g: ag.broadcast(x, 1, group=g),
        lambda xs: reference.broadcast(xs, 1),
    ),
    "reduce": (
        (5,) * 4,
        lambda x, g: ag.reduce(x, 1, group=g),
        lambda xs: reference.reduce(xs, 1),
    ),
}


def test_every_algorithm_across_hosts_is_tested():
    assert sorted(CALLS) == sorted([*OPERATIONS, "all_to_all"])  # which is pairwise there too
    found = {
        (operation, entry.name)
        for operation, entries in algorithms.TABLE.items()
        for entry in entries
        if entry.run.__module__ == across_hosts.__name__
    }
    assert found == {*OTHERS.items(), *((name, "across_hosts") for name in OPERATIONS)}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_gradients_are_exact(layout, others):
    group = group_on(layout)
    for name, (rows, call, wanted) in CALLS.items():
        if others and name not in OTHERS:
            continue
        with forced(segment=48, others=others):  # bytes: the last one is shorter
            check_exact(lambda x, call=call: call(x, group), wanted, pieces([(n, 3) for n in rows]))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("layout", ["aabb", "abbb", "aaab", "abbc", "abcd", "abab"])
def test_scan_is_exact(layout, monkeypatch):
    monkeypatch.setattr(sys.modules["allgrad.collectives.scan"], "FLAT_PIECE", 0)
    group = group_on(layout)
    for exclusive in (False, True):
        check_exact(
            lambda x, exclusive=exclusive: ag.scan(x, exclusive=exclusive, group=group),
            lambda xs, exclusive=exclusive: reference.scan(xs, "sum", exclusive),
            pieces([(5, 3)] * 4),
        )


@pytest.mark.ranks(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sum_has_the_same_bits_on_every_rank(rank, layout):
    group = group_on(layout)
    x = torch.randn(70_001, generator=torch.Generator().manual_seed(rank))
    with forced(segment=1 << 16):
        found = ag.all_reduce(x, group=group)
    everyone = ag.all_gather(found.view(torch.int32).unsqueeze(0))
    assert (everyone == everyone[0]).all()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sum_in_short_segments_is_exact_with_a_core_for_each_rank(rank, layout, monkeypatch):
    monkeypatch.setattr(sys.modules["allgrad._wire.hosts"], "_cores", lambda: 4)
    group = group_on(layout)
    assert not find_group("test", group).topology.crowded
    n = across_hosts.SHORT_SEGMENT // 8 * 3 + 1  # four segments, the last one of one element
    pieces_ = [torch.randint(-9, 9, (n,)).double() for _ in range(4)]  # sums without rounding
    for piece in pieces_:
        dist.broadcast(piece, 0)
    x = pieces_[rank].requires_grad_()
    weights = torch.arange(n, dtype=torch.float64) % 7 + rank
    with forced(), Traffic() as traffic:
        found = ag.all_reduce(x, group=group)
        (gradient,) = torch.autograd.grad(found, x, weights)
    assert torch.equal(found, sum(pieces_))
    assert torch.equal(gradient, 4 * (weights - rank) + 6)
    if layout == "aabb":
        leaving = sum(traffic.sent_to[peer] for peer in (2, 3)) if rank < 2 else 0
        assert ag.all_reduce(torch.tensor(leaving)).item() == 2 * x.nbytes


PIECE = 128 * 1024  # elements: more than the limits for flat algorithms and repeated exchanges
# How many pieces leave host a: what its ranks hold, or their sums, once for every other host.
CROSSING = {
    "all_gather": (lambda x, g: ag.all_gather(x, sizes="equal", group=g), 2),
    "reduce_scatter": (lambda x, g: ag.reduce_scatter(x, sizes="equal", group=g), 0.5),
    "all_reduce": (lambda x, g: ag.all_reduce(x, group=g), 1),
    "all_to_all": (lambda x, g: ag.all_to_all(x, send_sizes="equal", group=g), 1),
    "broadcast": (lambda x, g: ag.broadcast(x, 1, group=g), 1),
    "reduce": (lambda x, g: ag.reduce(x, 2, group=g), 1),
}


@pytest.mark.ranks(4)
def test_every_byte_leaves_a_host_once(rank):
    group = group_on("aabb")
    x = torch.ones(PIECE, requires_grad=True)
    scans = {
        "scan": (lambda x, g: ag.scan(x, group=g), 1),
        "exclusive scan": (lambda x, g: ag.scan(x, exclusive=True, group=g), 1),
    }
    for name, (call, expected) in {**CROSSING, **scans}.items():
        with forced(), Traffic() as traffic:
            call(x, group)
        leaving = sum(traffic.sent_to[peer] for peer in (2, 3)) if rank < 2 else 0
        assert ag.all_reduce(torch.tensor(leaving)).item() == expected * x.nbytes, name


@pytest.mark.ranks(4)
def test_receives_are_announced_before_data_goes_the_other_way(rank):
    """Announced behind it, they would wait for it, and a link's directions would take turns."""
    group = group_on("aabb")
    x = torch.ones(PIECE)
    peers = (2, 3) if rank < 2 else (0, 1)
    for name in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
        with forced(), Traffic() as traffic:
            CROSSING[name][0](x, group)
        posted = [(what, peer) for what, peer in traffic.posted if peer in peers]
        both = [peer for peer in peers if ("send", peer) in posted and ("recv", peer) in posted]
        assert ag.all_reduce(torch.tensor(len(both))) > 0, (
            name
        )  # of a short sum one rank carries all
        for peer in both:
            assert posted.index(("recv", peer)) < posted.index(("send", peer)), name


@pytest.mark.ranks(6)
def test_with_three_hosts_no_link_carries_a_piece_for_each_of_the_others(rank):
    """A root's link carries a chunk for each rank elsewhere, and then its share of the chunks."""
    group = group_on("aabbcc")
    topology = find_group("test", group).topology
    x = torch.ones(3 * PIECE, requires_grad=True)
    for name, call in {
        "broadcast": lambda: ag.broadcast(x, 1, group=group),
        "reduce": lambda: ag.reduce(x, 1, group=group),
    }.items():
        with Traffic() as traffic:
            call()
        about = name, Backend.GLOO, True, 6, x.nbytes, 6 * x.nbytes, True, True, topology
        entry = algorithms.choose(algorithms.Situation(*about))
        assert entry.name == "scattered"
        away = [peer for peer in range(6) if topology.host_of[peer] != topology.host_of[rank]]
        sent = torch.zeros(3, dtype=torch.int64)
        sent[topology.host_of[rank]] = sum(traffic.sent_to[peer] for peer in away)
        leaving = ag.all_reduce(sent, grad="none").tolist()
        root, elsewhere = (4 / 3, 2 / 3) if name == "broadcast" else (2 / 3, 1)
        assert leaving == [root * x.nbytes, elsewhere * x.nbytes, elsewhere * x.nbytes], name
        moved = ag.all_reduce(torch.tensor(traffic.sent + traffic.received), "max").item()
        assert entry.cost(algorithms.Situation(*about)).nbytes == pytest.approx(moved), name


def test_one_rank_on_each_host_leaves_no_root_to_send_everything():
    four = Topology(((0,), (1,), (2,), (3,)), ("a", "b", "c", "d"))
    for name, wanted in (
        ("all_reduce", "backend"),
        ("all_gather", "ring"),
        ("broadcast", "chunked"),
        ("reduce", "chunked"),
    ):
        about = name, Backend.GLOO, True, 4, 1 << 18, 1 << 20, True, True, four
        assert algorithms.choose(algorithms.Situation(*about)).name == wanted


@pytest.mark.ranks(4)
def test_costs_are_what_the_busiest_rank_moves(rank):
    group = group_on("aabb")
    topology = find_group("test", group).topology
    x = torch.ones(PIECE)
    for name, (call, _) in CROSSING.items():
        with forced(), Traffic() as traffic:
            call(x, group)
        moved = ag.all_reduce(torch.tensor(traffic.sent + traffic.received), "max").item()
        piece = x.nbytes // 4 if name == "reduce_scatter" else x.nbytes
        about = name, Backend.GLOO, True, 4, piece, 4 * piece, True, True, topology
        entry = algorithms.choose(algorithms.Situation(*about))
        assert entry.name == ("receives_first" if name == "all_to_all" else "across_hosts")
        assert entry.cost(algorithms.Situation(*about)).nbytes == pytest.approx(moved), name
