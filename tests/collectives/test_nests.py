"""Nests: leaves of one dtype travel in one message, and each keeps its own gradient."""

import enum
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

import allgrad as ag
import reference
from allgrad.errors import AllgradError, CollectiveMismatch, PieceMismatch, SizesError, TensorError
from counting import Counted
from exactness import grads, leaf, loss, random, same


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class PairOfOne(Pair):
    """Made of one tensor."""

    def __new__(cls, x):
        return super().__new__(cls, x, x.sum())


@dataclass
class Batch:
    image: torch.Tensor
    labels: torch.Tensor
    note: str


class Record(dict):
    """A dict of the caller's own."""


def nest(rank):
    return {
        "b": [leaf(random((rank + 1, 2), rank)), leaf(random((2, 3, 2), rank + 10))],
        "a": Pair(leaf(random((rank + 2, 1), rank + 20)), torch.arange(rank + 1)),
    }


CALLS = {
    "all_gather": (ag.all_gather, lambda xs: reference.all_gather(xs, 0)),
    "gather": (lambda x: ag.gather(x, 1), lambda xs: reference.gather(xs, 1)),
    "all_to_all": (ag.all_to_all, reference.all_to_all),
    "shift": (ag.shift, reference.shift),
}
ALIKE = {
    "all_reduce": (ag.all_reduce, reference.all_reduce),
    "all_reduce max": (
        lambda x: ag.all_reduce(x, "max"),
        lambda xs: reference.all_reduce(xs, "max"),
    ),
    "reduce_scatter": (ag.reduce_scatter, reference.reduce_scatter),
    "reduce_scatter prod": (
        lambda x: ag.reduce_scatter(x, op="prod"),
        lambda xs: reference.reduce_scatter(xs, 0, "prod"),
    ),
    "broadcast": (lambda x: ag.broadcast(x, 1), lambda xs: reference.broadcast(xs, 1)),
    "reduce": (lambda x: ag.reduce(x, 1), lambda xs: reference.reduce(xs, 1)),
    "reduce min": (lambda x: ag.reduce(x, 1, "min"), lambda xs: reference.reduce(xs, 1, "min")),
    "scan": (ag.scan, reference.scan),
    "scan prod": (lambda x: ag.scan(x, "prod"), lambda xs: reference.scan(xs, "prod")),
}


@pytest.mark.one_in(4)
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", [*CALLS, *ALIKE])
def test_each_leaf_is_exact(rank, world, name):
    call, model = (CALLS | ALIKE)[name]
    nests = [nest(r if name in CALLS else 0) for r in range(world)]
    if name in ALIKE:  # other values in the same shapes
        for r, n in enumerate(nests):
            for i, t in enumerate([*n["b"], n["a"].first]):
                t.data = random(t.shape, 31 * r + i)

    def leaves(n):
        return [n["a"].first, *n["b"]]

    wanted = [model([leaves(n)[i] for n in nests]) for i in range(3)]
    total = sum(loss(w[r], 10 * i + r) for i, w in enumerate(wanted) for r in range(world))
    want_first = grads(total, [x for n in nests for x in leaves(n)], graph=True)
    want_second = grads(
        sum(g.square().sum() for g in want_first), [x for n in nests for x in leaves(n)]
    )

    got = call(nests[rank])
    assert list(got) == ["b", "a"]
    assert isinstance(got["a"], Pair)
    ints = model([n["a"].second for n in nests])[rank]
    assert torch.equal(got["a"].second, ints)
    for i, y in enumerate(leaves(got)):
        same(y.detach(), wanted[i][rank].detach(), f"leaf {i}")
    mine = sum(loss(y, 10 * i + rank) for i, y in enumerate(leaves(got)))
    first = grads(mine, leaves(nests[rank]), graph=True)
    second = grads(sum(g.square().sum() for g in first), leaves(nests[rank]))
    for i in range(3):
        same(first[i].detach(), want_first[3 * rank + i].detach(), f"leaf {i}'s gradient")
        same(second[i], want_second[3 * rank + i], f"leaf {i}'s second derivative")


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", [*CALLS, *ALIKE])
def test_one_message_for_each_dtype(rank, name):
    """One size exchange, one message for the three floating leaves, one for the whole numbers."""
    call, _ = (CALLS | ALIKE)[name]
    x = nest(rank if name in CALLS else 0)
    with Counted() as calls:
        y = call(x)
    exchanges = 1 if name in CALLS or name.startswith("reduce_scatter") else 0
    per_dtype = 2 if name == "scan" else 1  # log2 of three ranks
    assert len(calls) == exchanges + 2 * per_dtype, calls
    with Counted() as calls:
        sum(t.sum() for t in [y["a"].first, *y["b"]]).backward()
    assert len(calls) == per_dtype, calls  # nothing for the whole numbers


@pytest.mark.ranks(3)
def test_split_share_and_scatter_take_nests(rank):
    x = {"a": leaf(random((5, 2), 1)), "b": [leaf(random((4,), 2))]}
    part = ag.split(x)
    same(part["a"].detach(), x["a"].detach().tensor_split(3)[rank], "the first part")
    same(part["b"][0].detach(), x["b"][0].detach().tensor_split(3)[rank], "the second part")
    (part["a"].sum() * (rank + 1) + part["b"][0].sum()).backward()
    want = torch.cat([torch.full_like(p, r + 1) for r, p in enumerate(x["a"].tensor_split(3))])
    same(x["a"].grad, want.detach(), "the joined gradient")
    shared = ag.share(x)
    assert torch.equal(shared["b"][0], x["b"][0])
    given = x if rank == 0 else {"a": torch.empty(0, 2).double(), "b": [torch.empty(0).double()]}
    dealt = ag.scatter(given)
    same(dealt["a"].detach(), x["a"].detach().tensor_split(3)[rank], "the dealt part")


@pytest.mark.ranks(3)
def test_containers_keep_their_types(rank):
    x = Batch(torch.ones(rank + 1, 2), torch.arange(rank + 1), "as it was")
    y = ag.all_gather(x)
    assert isinstance(y, Batch)
    assert y.note == "as it was"
    assert y.image.shape == (6, 2)
    assert y.labels.tolist() == [0, 0, 1, 0, 1, 2]
    z = ag.all_reduce(OrderedDict(b=torch.ones(1), a=3))
    assert type(z) is OrderedDict
    assert (z["b"].item(), z["a"]) == (3.0, 3)
    assert ag.gather_sizes({"x": torch.zeros(rank, 2)}) == {"x": (0, 1, 2)}
    assert ag.all_gather({}) == {}
    assert ag.all_reduce([]) == []


@pytest.mark.ranks(3)
def test_named_tuple_with_a_constructor_of_its_own_is_rebuilt(rank):
    x = PairOfOne(leaf(random((2,), rank)))
    x.note = "as it was"
    pieces = [random((2,), r) for r in range(3)]
    for y in (ag.all_reduce(x), ag.all_reduce(x, async_op=True).wait()):
        assert type(y) is PairOfOne
        assert y.note == "as it was"
        same(y.first.detach(), sum(pieces), "first")
        same(y.second.detach(), sum(pieces).sum(), "second")
    (got,) = grads((y.first * (rank + 1)).sum() + y.second * 2, [x.first])
    same(got, torch.full_like(got, 1 + 2 + 3 + 2 * 3), "the gradient of both fields")


@pytest.mark.ranks(2)
def test_a_nest_of_many_tensors_needs_one_more_message(rank):
    x = [torch.full((rank + 1, 2), float(i)) for i in range(200)]
    with Counted() as calls:
        y = ag.all_gather(x)
    assert len(calls) == 3
    assert all(torch.equal(t, torch.full((3, 2), float(i))) for i, t in enumerate(y))


@pytest.mark.ranks(3)
def test_other_structures_are_told_apart(rank):
    x = {"a": torch.ones(2), "b" if rank != 1 else "c": torch.ones(2)}
    with pytest.raises(PieceMismatch, match="rank 1: 2 tensors   <- another structure"):
        ag.all_gather(x)
    with pytest.raises(PieceMismatch, match="rank 2: 1 tensors   <- another structure"):
        ag.all_gather([torch.ones(1)] * (1 if rank == 2 else 2))
    with pytest.raises(PieceMismatch, match=r"x\['k'\]\[1\]: pieces may differ along dim 0 only"):
        ag.all_gather({"k": [torch.ones(1, 1), torch.ones(1, 1 + (rank == 0))]})
    with pytest.raises(TensorError, match="not a tensor"):
        ag.all_gather([1.0, 2.0])
    assert ag.all_gather(torch.tensor([rank])).tolist() == [0, 1, 2]


Modality = enum.Enum("Modality", "IMAGE TEXT")
UNSORTED_KEYS = {
    "enum members": (Modality.TEXT, Modality.IMAGE),
    "tuples with them": (("x", Modality.TEXT), ("x", Modality.IMAGE)),
    "frozensets": (frozenset({"b", "d", "f"}), frozenset({"a", "c", "e"})),
    "dtypes": (torch.int8, torch.float32),
    "devices": (torch.device("cpu"), torch.device("cpu", 0)),
    "types": (str, float),
    "several kinds": (None, Modality.IMAGE),
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", UNSORTED_KEYS)
@pytest.mark.parametrize("make", [dict, Record])
def test_keys_that_have_no_order_meet_their_own_whatever_the_insertion_order(
    rank, world, kind, make
):
    one, other = UNSORTED_KEYS[kind]
    x, y = leaf(random((2,), rank)), leaf(random((2,), 10 + rank))
    filled = make([(one, x), (other, y)] if rank == 1 else [(other, y), (one, x)])
    for call in (ag.all_reduce, ag.all_gather):
        found = call(filled)
        assert type(found) is make
        assert list(found) == list(filled)
        same(found[one], call(x), f"{call.__name__} of {one}")
        same(found[other], call(y), f"{call.__name__} of {other}")
    (g,) = grads((rank + 1) * ag.all_reduce(filled)[one].sum(), [x])
    same(g, torch.full((2,), world * (world + 1) / 2, dtype=g.dtype), "gradient")


@pytest.mark.ranks(2)
def test_keys_that_have_no_order_meet_their_own_in_graphs_and_in_checked_mode(rank):
    texts, images = torch.tensor([1.0 + rank]), torch.tensor([10.0 + rank])
    filled = [(Modality.TEXT, texts), (Modality.IMAGE, images)]
    x = dict(filled if rank else reversed(filled))
    compiled = torch.compile(ag.all_reduce, backend="aot_eager", fullgraph=True)
    assert compiled(x) == {Modality.TEXT: 3.0, Modality.IMAGE: 21.0}
    with ag.checked():
        assert ag.all_reduce(x) == {Modality.TEXT: 3.0, Modality.IMAGE: 21.0}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", ["enum members", "frozensets"])
def test_other_keys_that_have_no_order_raise_on_every_rank(rank, kind):
    x = {UNSORTED_KEYS[kind][rank == 1]: torch.ones(2)}
    with pytest.raises(PieceMismatch, match="rank 1: 1 tensors   <- another structure"):
        ag.all_gather(x)
    with pytest.raises(AllgradError, match="the ranks bring different tensors to one call"):
        ag.all_reduce(x)


@pytest.mark.ranks(2)
def test_a_result_may_be_changed_in_place(rank):
    x = leaf(random((2, 2), rank))
    for call in (ag.all_reduce, ag.all_gather, ag.broadcast, ag.scan, ag.shift):
        y = call(x)
        y /= 2
        y += 1
        (g,) = grads(y.sum(), [x])
        assert g.shape == x.shape
    with pytest.raises(RuntimeError, match=r"in.?place"):
        ag.share(x).add_(1)


def whole(n):
    """A nest of three leaves of that length; one has a dtype of its own."""
    x = random((n, 2), n)
    return {"a": x, "b": [x[:, 0].clone(), torch.arange(n)]}


WITH_SIZES = {
    "all_gather": lambda rank, sizes: ag.all_gather(whole(rank + 1), sizes=sizes(1, 2, 3)),
    "reduce_scatter": lambda _, sizes: ag.reduce_scatter(whole(6), sizes=sizes(1, 2, 3)),
    "split": lambda _, sizes: ag.split(whole(6), sizes=sizes(1, 2, 3)),
    "gather": lambda rank, sizes: ag.gather(whole(rank + 1), sizes=sizes(1, 2, 3)),
    "scatter": lambda rank, sizes: ag.scatter(
        whole(0 if rank else 6), sizes=None if rank else sizes(1, 2, 3)
    ),
    "all_to_all": lambda rank, sizes: ag.all_to_all(
        whole(6), send_sizes=sizes(1, 2, 3), recv_sizes=sizes(*[rank + 1] * 3)
    ),
    "all_to_all, found": lambda _, sizes: ag.all_to_all(whole(6), send_sizes=sizes(1, 2, 3)),
    "permute": lambda rank, sizes: ag.permute(whole(rank + 1), [(0, 1)], sizes=sizes(1, 2, 3)),
    "shift": lambda rank, sizes: ag.shift(whole(rank + 1), sizes=sizes(1, 2, 3)),
}


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", WITH_SIZES)
def test_sizes_from_an_iterator_are_for_all_leaves(rank, name):
    call = WITH_SIZES[name]
    want = call(rank, lambda *sizes: sizes)
    for got in (call(rank, lambda *sizes: iter(sizes)), call(rank, lambda *s: (n for n in s))):
        same(got["a"], want["a"], "the matrix")
        same(got["b"][0], want["b"][0], "the vector")
        assert torch.equal(got["b"][1], want["b"][1])


@pytest.mark.ranks(3)
def test_sizes_from_an_iterator_in_a_graph(rank):
    def gather(x, numbers):
        return ag.all_gather(x, sizes=(n + 1 for n in numbers))

    compiled = torch.compile(gather, backend="aot_eager", fullgraph=True)
    got, want = (f(whole(rank + 1), (0, 1, 2)) for f in (compiled, gather))
    same(got["a"], want["a"], "the matrix")
    same(got["b"][0], want["b"][0], "the vector")


@pytest.mark.ranks(3)
def test_an_error_names_sizes_from_an_iterator():
    with pytest.raises(SizesError, match=r"sizes=\[1, 2, -3\]"):
        ag.split(torch.ones(6), sizes=iter((1, 2, -3)))
    with pytest.raises(SizesError, match=r"recv_sizes=\[2, 2, -2\]"):
        ag.all_to_all(torch.ones(6), recv_sizes=iter((2, 2, -2)))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", [*CALLS, *ALIKE])
def test_nests_without_tensors_meet_in_one_message(name):
    """In a graph too."""
    call, _ = (CALLS | ALIKE)[name]
    compiled = torch.compile(lambda x: call(x), backend="aot_eager", fullgraph=True)  # noqa: PLW0108
    compiled([])
    for one in (call, compiled):
        with Counted() as calls:
            assert one([]) == []
        assert len(calls) == 1, calls


@pytest.mark.ranks(3)
def test_an_empty_nest_on_one_rank_is_named_in_checked_mode(rank):
    with ag.checked(), pytest.raises(CollectiveMismatch, match="nothing was sent"):
        ag.all_reduce([] if rank == 1 else [torch.ones(3)])
    assert ag.all_gather(torch.tensor([rank])).tolist() == [0, 1, 2]
