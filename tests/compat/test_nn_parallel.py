"""torch.nn.parallel's names behave as the originals do, on CPU devices too."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch

from allgrad.compat.nn_parallel import (
    Broadcast,
    Gather,
    ReduceAddCoalesced,
    Scatter,
    gather,
    scatter,
    scatter_kwargs,
)
from allgrad.errors import InputError, PieceMismatch, SizesError, TensorError

CPUS = ["cpu", torch.device("cpu"), -1]  # the originals call the CPU -1


class Output(NamedTuple):
    logits: object
    loss: object


def leaf(*shape, seed=0):
    made = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=made, dtype=torch.float64, requires_grad=True)


def derivatives(ys, xs):
    """First and second derivatives of a loss that tells all results apart."""
    loss = sum(((i + 1) * y.sin()).sum() for i, y in enumerate(ys))
    first = torch.autograd.grad(loss, xs, create_graph=True)
    return *first, *torch.autograd.grad(sum((g * g).sum() for g in first), xs)


def check(ys, wanted, xs):
    assert isinstance(ys, tuple)
    for y, want in zip(
        (*ys, *derivatives(ys, xs)), (*wanted, *derivatives(wanted, xs)), strict=True
    ):
        assert y.shape == want.shape
        torch.testing.assert_close(y, want, rtol=1e-12, atol=1e-13)


def test_broadcast_lists_device_after_device():
    a, b = leaf(2, 3), leaf(4, seed=1)
    check(Broadcast.apply(CPUS, a, b), [x.clone() for _ in CPUS for x in (a, b)], [a, b])


def test_broadcast_marks_what_needs_no_gradient():
    a, b = leaf(2), torch.ones(3)
    copies = Broadcast.apply(CPUS, a, b, torch.arange(2))
    assert [x.requires_grad for x in copies] == [True, False, False] * 3


def test_broadcast_of_nothing_is_nothing():
    assert Broadcast.apply(CPUS) == ()


def test_reduce_add_takes_device_after_device():
    xs = [leaf(2, seed=0), leaf(3, seed=1), leaf(2, seed=2), leaf(3, seed=3)]
    check(ReduceAddCoalesced.apply("cpu", 2, *xs), [xs[0] + xs[2], xs[1] + xs[3]], xs)


def test_reduce_add_needs_as_many_from_each_device():
    with pytest.raises(InputError, match="3 tensors are not a multiple of 2"):
        ReduceAddCoalesced.apply("cpu", 2, *[torch.ones(2)] * 3)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gather_joins_uneven_inputs(dim):
    shapes = [[2, 2], [2, 2], [2, 2]]
    for shape, size in zip(shapes, (1, 0, 3), strict=True):
        shape[dim] = size
    xs = [leaf(*shape, seed=i) for i, shape in enumerate(shapes)]
    check((Gather.apply(-1, dim, *xs),), [torch.cat(xs, dim)], xs)


def test_gather_makes_a_vector_of_scalars_without_a_warning():
    xs = [leaf(seed=i) for i in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        joined = Gather.apply("cpu", 0, *xs)
    check((joined,), [torch.stack(xs)], xs)


@pytest.mark.parametrize(("sizes", "dim"), [((1, 4, 2), 0), ((0, 7, 0), 1), ((3, 3, 1), -1)])
def test_scatter_cuts_by_chunk_sizes(sizes, dim):
    x = leaf(7, 7)
    check(Scatter.apply(CPUS, sizes, dim, x), x.split(sizes, dim), [x])


@pytest.mark.parametrize("length", range(10))
def test_scatter_without_sizes_cuts_as_torch_chunks(length):
    x = leaf(2, length)
    pieces, wanted = Scatter.apply(CPUS, None, 1, x), x.chunk(3, 1)
    assert [p.shape for p in pieces] == [w.shape for w in wanted]
    check(pieces, wanted, [x])


def test_scatter_names_sizes_that_do_not_fit():
    with pytest.raises(SizesError, match="one size for each device; they must add up to 4, not 3"):
        Scatter.apply(CPUS, (1, 1, 1), 0, torch.ones(4))


def test_scatter_of_a_tensor_is_a_tuple():
    pieces = scatter(torch.arange(5), CPUS)
    assert isinstance(pieces, tuple)
    assert [p.tolist() for p in pieces] == [[0, 1], [2, 3], [4]]


def test_scatter_of_a_nest_is_a_list_of_nests():
    x, y = leaf(6, 2), torch.arange(6)
    nest = (OrderedDict(x=x, rest=[y, "name", None]), Output(x, 3))
    parts = scatter(nest, CPUS)
    assert isinstance(parts, list)
    for i, (first, second) in enumerate(parts):
        assert type(first) is OrderedDict
        assert list(first) == ["x", "rest"]
        assert torch.equal(first["x"], x[2 * i : 2 * i + 2])
        assert first["rest"][0].tolist() == [2 * i, 2 * i + 1]
        assert first["rest"][1:] == ["name", None]
        assert isinstance(second, Output)
        assert second.loss == 3
        assert torch.equal(second.logits, first["x"])
    assert scatter({"flag": True}, CPUS) == [{"flag": True}] * 3
    assert scatter((), CPUS) == [()] * 3


def test_scatter_of_a_short_batch_uses_fewer_devices():
    assert [p["x"].tolist() for p in scatter({"x": torch.arange(2), "k": 1}, CPUS)] == [[0], [1]]


def test_scatter_along_another_dim():
    assert [p[0].shape for p in scatter([torch.ones(2, 3)], CPUS, 1)] == [(2, 1)] * 3


def test_scatter_kwargs_fills_up_what_is_missing():
    x = torch.arange(3)
    args, kwargs = scatter_kwargs((x, 7), None, CPUS)
    assert [(a.tolist(), b) for a, b in args] == [([0], 7), ([1], 7), ([2], 7)]
    assert kwargs == ({}, {}, {})
    args, kwargs = scatter_kwargs((), {"x": x}, CPUS)
    assert args == ((), (), ())
    assert [k["x"].tolist() for k in kwargs] == [[0], [1], [2]]
    assert scatter_kwargs((), None, CPUS) == ((), ())
    assert scatter_kwargs((), {}, CPUS) == ((), ())


def test_tensors_that_would_lose_a_part_raise():
    with pytest.raises(InputError, match="same number of parts"):
        scatter((torch.ones(3), torch.ones(2)), CPUS)


def test_gather_rebuilds_the_nest():
    xs = [leaf(i + 1, 2, seed=i) for i in range(3)]
    outputs = [Output({"b": x, "a": [x * 2]}, (x.sum(), None)) for x in xs]
    joined = gather(outputs, "cpu")
    assert isinstance(joined, Output)
    assert list(joined.logits) == ["b", "a"]
    assert joined.loss[1] is None
    check(
        (joined.logits["b"], joined.logits["a"][0], joined.loss[0]),
        [torch.cat(xs), 2 * torch.cat(xs), torch.stack([x.sum() for x in xs])],
        xs,
    )
    assert gather([None, None], "cpu") is None
    assert torch.equal(gather([x.detach().T for x in xs], "cpu", 1), torch.cat(xs).T)


def test_gather_undoes_scatter():
    x = leaf(7, 2)
    check((gather(scatter(x, CPUS), "cpu"),), [x.clone()], [x])


@pytest.mark.parametrize(
    ("outputs", "error", "words"),
    [
        ([], InputError, "outputs is empty"),
        ([{"a": torch.ones(1)}, {"b": torch.ones(1)}], PieceMismatch, "1: .* <- differs from 0"),
        ([[torch.ones(1)], [None]], TensorError, "NoneType, not a tensor"),
        ([1.0, 2.0], InputError, "output 0 holds a float"),
    ],
)
def test_gather_names_what_it_cannot_join(outputs, error, words):
    with pytest.raises(error, match=words):
        gather(outputs, "cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_results_equal_the_originals_on_cuda():
    original = torch.nn.parallel._functions
    x, y = leaf(5, 2), leaf(3, seed=1)
    there = [x.detach().cuda().requires_grad_(), y.detach().cuda().requires_grad_()]
    check(Scatter.apply([0, 0], None, 0, x), original.Scatter.apply([0, 0], None, 0, x), [x])
    check(Broadcast.apply([0, 0], *there), original.Broadcast.apply([0, 0], *there), there)
    for target in (0, "cpu", None):
        ours, theirs = (
            Gather.apply(target, 0, *there[:1] * 2),
            original.Gather.apply(target, 0, *there[:1] * 2),
        )
        assert ours.device == theirs.device
        check((ours,), (theirs,), there[:1])


def test_packed_sequences_are_not_joined():
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    with pytest.raises(InputError, match=r"gather: a PackedSequence cannot be joined(.*\n)+.*pad"):
        gather([(packed, 1), (packed, 1)], "cpu")
