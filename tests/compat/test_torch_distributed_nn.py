"""torch.distributed.nn.functional's names: its programs run, and their gradients are exact."""

from __future__ import annotations

import importlib
import inspect
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist

import allgrad.compat.torch_distributed_nn as compat
from exactness import grads, leaf, loss, place, random, same
from places import on, process_group
from reference import STACKED

ORIGINAL = "torch.distributed.nn.functional"
COMPAT = "allgrad.compat.torch_distributed_nn"

# A program for the original. Each function takes the rank's list of tensors, one for each rank, and
# a global rank as root, and returns what it got. Output arguments, keywords and tuples as documented.
PROGRAM = f"""
from {ORIGINAL} import (
    _all_gather_base, all_gather, all_reduce, all_to_all, all_to_all_single, broadcast, gather,
    reduce, reduce_scatter, scatter,
)
import torch
from torch.distributed import ReduceOp

def use_broadcast(xs, root, group):
    return [broadcast(xs[0], root, group=group)]

def use_gather(xs, root, group):
    return list(gather(xs[0], dst=root, group=group))

def use_scatter(xs, root, group):
    return [scatter(xs, src=root, group=group)]

def use_reduce(xs, root, group, op=ReduceOp.SUM):
    return [reduce(xs[0], root, op=op, group=group)]

def use_all_reduce(xs, root, group, op=ReduceOp.SUM):
    return [all_reduce(xs[0], op=op, group=group)]

def use_reduce_scatter(xs, root, group, op=ReduceOp.SUM):
    return [reduce_scatter(torch.empty_like(xs[0]), xs, op, group)]

def use_all_gather(xs, root, group):
    return list(all_gather(xs[0], group))

def use_all_gather_base(xs, root, group):
    output = torch.empty(len(xs) * xs[0].shape[0], *xs[0].shape[1:], dtype=xs[0].dtype)
    return [_all_gather_base(output, xs[0], group=group)]

def use_all_to_all(xs, root, group):
    outputs = [torch.empty_like(x) for x in xs]
    all_to_all(outputs, xs, group=group)
    return outputs

def use_all_to_all_single(xs, root, group):
    whole = torch.cat(xs)
    return [all_to_all_single(torch.empty_like(whole), whole, group=group)]
"""


def program(module, name):
    """A function of the program, with the import line changed."""
    space = {}
    exec(PROGRAM.replace(ORIGINAL, module), space)
    return space[f"use_{name}"]


def root_only(world, root, at_root, elsewhere):
    return [at_root if r == root else elsewhere for r in range(world)]


def first(xs):
    return [x[0] for x in xs]


def zeros(xs):
    return [torch.zeros_like(x) for x in xs]


# What one process holding all ranks' lists gets: results of rank r from all lists xs and root.
EXACT = {
    "broadcast": lambda xs, root: [[xs[root][0]]] * len(xs),
    "gather": lambda xs, root: root_only(len(xs), root, first(xs), zeros(first(xs))),
    "scatter": lambda xs, root: [[x] for x in xs[root]],
    "reduce": lambda xs, root, op="sum": root_only(
        len(xs), root, [STACKED[op](torch.stack(first(xs)))], zeros(first(xs))[:1]
    ),
    "all_reduce": lambda xs, _, op="sum": [[STACKED[op](torch.stack(first(xs)))]] * len(xs),
    "reduce_scatter": lambda xs, _, op="sum": [
        [STACKED[op](torch.stack([x[r] for x in xs]))] for r in range(len(xs))
    ],
    "all_gather": lambda xs, _: [first(xs)] * len(xs),
    "all_gather_base": lambda xs, _: [[torch.cat(first(xs))]] * len(xs),
    "all_to_all": lambda xs, _: [[x[r] for x in xs] for r in range(len(xs))],
    "all_to_all_single": lambda xs, _: [[torch.cat([x[r] for x in xs])] for r in range(len(xs))],
}
REDUCING = ("reduce", "all_reduce", "reduce_scatter")
OPS = {"AVG": "mean", "PRODUCT": "prod", "MIN": "min", "MAX": "max"}


def weighed(y):
    """Rank r counts the result r + 1 times."""
    return ((dist.get_rank() + 1) * y).sum()


def total(results, seed):
    return sum(loss(y, seed + 7 * i) for i, y in enumerate(results))


def make_lists(world, *, ties=False):
    """A list for each rank; with ties and zeros, small whole numbers."""
    made = [[random((2, 3), 100 * r + i) for i in range(world)] for r in range(world)]
    return [[x.round() for x in xs] for xs in made] if ties else made


def global_root(group):
    """The last member of the group, by its global rank and its rank within."""
    found = process_group(group)
    _, world = place(group)
    return (dist.get_global_rank(found, world - 1) if found else world - 1), world - 1


def check_program(group, module, name, op=None, *, layout="contiguous", values=True, second=True):
    rank, world = place(group)
    root, root_in_group = global_root(group)
    options = () if op is None else (OPS[op],)
    lists = make_lists(world, ties=op is not None)
    leaves = [[leaf(x, layout) for x in xs] for xs in lists]
    flat = [x for xs in leaves for x in xs]
    wanted = EXACT[name](leaves, root_in_group, *options)
    first_wanted = grads(sum(total(y, r) for r, y in enumerate(wanted)), flat, graph=True)
    second_wanted = grads(total(first_wanted, 50), flat)
    mine = slice(rank * world, (rank + 1) * world)

    xs = [leaf(x, layout) for x in lists[rank]]
    before = [x.detach().clone() for x in xs]
    run = program(module, name)
    got = run(
        xs, root, process_group(group), *(() if op is None else (getattr(dist.ReduceOp, op),))
    )
    if values:
        for y, want in zip(got, wanted[rank], strict=True):
            same(y.detach(), want.detach(), "the value")
    first_got = grads(total(got, rank), xs, graph=second)
    for g, want in zip(first_got, first_wanted[mine], strict=True):
        same(g.detach(), want.detach(), "the first derivative")
    if second:
        seeds = range(50 + 7 * rank * world, 50 + 7 * (rank + 1) * world, 7)
        again = sum(loss(g, seed) for g, seed in zip(first_got, seeds, strict=True))
        for g, want in zip(grads(again, xs), second_wanted[mine], strict=True):
            same(g, want, "the second derivative")
    assert all(torch.equal(x.detach(), b) for x, b in zip(xs, before, strict=True))


WHERE = ("no world", "1 rank", "3 ranks", "ranks 1 and 3 of 4")


@pytest.mark.one_in(7)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", EXACT)
def test_program_is_exact_with_its_import_line_changed(where, name):
    on(where, check_program, COMPAT, name)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("where", ["3 ranks", "ranks 1 and 3 of 4"])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", REDUCING)
def test_every_reduction_is_exact(where, name, op):
    on(where, check_program, COMPAT, name, op)


@pytest.mark.one_in(7)
@pytest.mark.parametrize("layout", ["transposed", "slice"])
@pytest.mark.parametrize("name", EXACT)
def test_any_strides_are_exact(name, layout):
    on("3 ranks", lambda group: check_program(group, COMPAT, name, layout=layout))


@pytest.mark.parametrize("name", [name for name in EXACT if name != "all_gather_base"])
def test_program_is_one_for_the_original(name):
    """Where the original is right: sums in the default group, rows in order, one derivative."""

    def quietly(group):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            check_program(group, ORIGINAL, name, values=name != "reduce", second=False)

    on("3 ranks", quietly)


# Where the original hangs or takes the process down, so that only ours is run.


@pytest.mark.one_in(7)
@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", EXACT)
def test_rank_without_gradient_takes_part(rank, world, name):
    """The original's result needs grad only where its input does: the others wait in backward."""
    xs = [random((2, 3), 100 * rank + i) for i in range(world)]
    if rank == 1:
        xs = [x.requires_grad_() for x in xs]
    results = program(COMPAT, name)(xs, 0, None)
    assert all(y.requires_grad for y in results)
    total(results, rank).backward()
    assert rank != 1 or name == "scatter" or xs[0].grad is not None


@pytest.mark.ranks(3)
def test_receivers_of_scatter_may_pass_any_list(rank):
    """It is ignored, and has gradients of zero."""
    given = [leaf(random((2, 3), i)) for i in range(3)] if rank == 1 else None
    ignored = [leaf(torch.ones(n, 2, dtype=torch.float64)) for n in (1, 4)]
    y = compat.scatter(given or ignored, 1)
    assert torch.equal(y.detach(), random((2, 3), rank))
    (y * (rank + 1)).sum().backward()
    for i, x in enumerate(given or ignored):
        assert torch.equal(x.grad, torch.full_like(x, i + 1 if rank == 1 else 0))


@pytest.mark.ranks(3)
def test_receivers_of_scatter_pass_none(rank):
    """As documented; the original unpacks the None and raises there, and src waits."""
    xs = [random((2,), i).requires_grad_() for i in range(3)] if rank == 1 else None
    y = compat.scatter(xs, 1)
    same(y.detach(), random((2,), rank), "the value")
    weighed(y).backward()
    if xs:
        assert [x.grad.tolist() for x in xs] == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]


@pytest.mark.ranks(3)
def test_list_that_scatter_ignores_gets_gradients_of_zero(rank):
    xs = [torch.ones(2, requires_grad=True) for _ in range(3)]
    weighed(compat.scatter(xs, 1)).backward()
    assert [x.grad.tolist() for x in xs] == [[(r + 1.0) * (rank == 1)] * 2 for r in range(3)]


@pytest.mark.ranks(3)
def test_unequal_tensors_travel(rank, world):
    """On Gloo the original raises on one rank and leaves the others, or aborts."""
    lengths = (2, 0, 3)
    piece = random((lengths[rank], 2), rank).requires_grad_()
    for ys in (compat.all_gather(piece), compat.gather(piece, 2)):
        assert [tuple(y.shape) for y in ys] == [(n, 2) for n in lengths]
    xs = [torch.full((i + 1,), 10.0 * rank + i, requires_grad=True) for i in range(world)]
    outputs = [torch.empty(rank + 1) for _ in range(world)]
    ys = compat.all_to_all(outputs, xs)
    assert [y.tolist() for y in ys] == [[10.0 * r + rank] * (rank + 1) for r in range(world)]
    sum((i + 1) * weighed(y) for i, y in enumerate(ys)).backward()
    assert [x.grad.tolist() for x in xs] == [
        [(rank + 1.0) * (r + 1)] * (r + 1) for r in range(world)
    ]
    y = compat.reduce_scatter(torch.empty(rank + 1), xs)
    assert y.tolist() == [30.0 + 3 * rank] * (rank + 1)


# What the original documents and does, point by point.


@pytest.mark.parametrize("name", [*compat.__all__, "_all_gather_base"])
def test_arguments_have_the_original_names_and_order(name):
    theirs = inspect.signature(getattr(importlib.import_module(ORIGINAL), name)).parameters
    ours = inspect.signature(getattr(compat, name)).parameters
    positional = [p for p in ours.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in positional] == list(theirs)
    assert [p.default is p.empty for p in positional] == [
        p.default is p.empty for p in theirs.values()
    ]


def test_every_function_is_there():
    theirs = vars(importlib.import_module(ORIGINAL))
    functions = {n for n, f in theirs.items() if inspect.isfunction(f) and f.__module__ == ORIGINAL}
    assert functions - {"_deprecated", "_not_supported_under_compile"} == {
        *compat.__all__,
        "_all_gather_base",
    }


@pytest.mark.ranks(3)
def test_results_have_the_original_types(rank, world):
    x = torch.ones(2, 3)
    assert isinstance(compat.all_gather(x), tuple)
    assert isinstance(compat.gather(x), tuple)
    assert isinstance(compat.all_to_all([x.clone() for _ in range(3)], [x] * 3), tuple)
    for y in (compat.broadcast(x, 0), compat.reduce(x, 0), compat.all_reduce(x)):
        assert isinstance(y, torch.Tensor)


@pytest.mark.ranks(3)
def test_scalars_and_whole_numbers(rank):
    assert [y.shape for y in compat.all_gather(torch.tensor(1.0 * rank))] == [()] * 3
    assert [y.shape for y in compat.gather(torch.tensor(1.0 * rank), 1)] == [()] * 3
    assert compat.scatter([torch.tensor(r) for r in range(3)], 2).item() == rank
    ys = compat.all_gather(torch.tensor([rank]))
    assert [y.item() for y in ys] == [0, 1, 2]
    assert not ys[0].requires_grad
    output = torch.zeros(3, dtype=torch.int64)
    compat._all_gather_base(output, torch.tensor(rank))
    assert output.tolist() == [0, 1, 2]
    assert compat.all_reduce(torch.tensor(rank == 1), op=dist.ReduceOp.MAX).item() is True


@pytest.mark.ranks(3)
def test_pieces_can_be_changed_in_place(rank):
    x = torch.full((2,), rank + 1.0, requires_grad=True)
    ys = compat.all_gather(x)
    ys[0].mul_(10)
    sum((i + 1) * y.sum() for i, y in enumerate(ys)).backward()
    assert x.grad.tolist() == [(30.0, 6.0, 9.0)[rank]] * 2


@pytest.mark.ranks(3)
def test_output_argument_is_filled_and_shares_its_memory(rank):
    x = torch.arange(3.0) + 10 * rank
    calls = {
        "single": lambda out: compat.all_to_all_single(out, x),
        "base": lambda out: compat._all_gather_base(out, x[rank]),
        "scatter": lambda out: compat.reduce_scatter(out, [x, x, x]),
    }
    wanted = {
        "single": [rank, 10 + rank, 20 + rank],
        "base": [0, 11, 22],
        "scatter": [30, 33, 36],
    }
    for name, call in calls.items():
        out = torch.full((3,), -1.0)
        y = call(out)
        assert out.tolist() == wanted[name]
        assert y.data_ptr() == out.data_ptr()
        assert y.requires_grad
        assert not out.requires_grad  # the result is in the graph, the caller's buffer stays out
        y = call(out)  # and serves again
        y.sum().backward()


@pytest.mark.ranks(3)
def test_outputs_of_all_to_all_are_in_the_graph_and_serve_again(rank):
    memory = torch.zeros(3)
    for outputs in ([torch.zeros(1) for _ in range(3)], list(memory.chunk(3))):
        for _ in range(2):
            xs = [torch.full((1,), 10.0 * rank + i, requires_grad=True) for i in range(3)]
            ys = compat.all_to_all(outputs, xs)
            assert all(y is output for y, output in zip(ys, outputs, strict=True))
            sum((i + 1) * weighed(output) for i, output in enumerate(outputs)).backward()
            assert [x.grad.item() for x in xs] == [(rank + 1) * (r + 1) for r in range(3)]
    assert memory.tolist() == [rank, 10 + rank, 20 + rank]


@pytest.mark.ranks(3)
def test_split_sizes_count_along_the_first_dimension(rank, world):
    send = [(1, 2, 0), (0, 1, 3), (2, 0, 1)]
    receive = [send[r][rank] for r in range(world)]
    wholes = [random((sum(send[r]), 2), r) for r in range(world)]
    x = leaf(wholes[rank])
    y = compat.all_to_all_single(
        torch.empty(sum(receive), 2, dtype=torch.float64), x, receive, list(send[rank])
    )
    leaves = [leaf(w) for w in wholes]
    blocks = [w.split(send[r]) for r, w in enumerate(leaves)]
    wanted = [torch.cat([b[r] for b in blocks]) for r in range(world)]
    same(y.detach(), wanted[rank].detach(), "the value")
    (got,) = grads(loss(y, rank), [x])
    want = grads(sum(loss(w, r) for r, w in enumerate(wanted)), leaves)
    same(got, want[rank], "the derivative")
    out = torch.empty(3)
    assert compat.all_to_all_single(out, torch.arange(3.0) + rank, [], []).tolist() == [
        rank + r for r in range(world)
    ]


@pytest.mark.ranks(3)
@pytest.mark.parametrize("kind", [torch.tensor, np.array, iter])
def test_split_sizes_of_any_kind(rank, kind):
    send, receive = [1, 2, 3], [rank + 1] * 3
    y = compat.all_to_all_single(
        torch.empty(3 * rank + 3), torch.arange(6.0) + 10 * rank, kind(receive), kind(send)
    )
    starts = [0, 1, 3]
    assert y.tolist() == [10.0 * r + starts[rank] + i for r in range(3) for i in range(rank + 1)]


@pytest.mark.ranks(3)
def test_result_is_bitwise_the_same_on_every_rank(rank):
    total = compat.all_reduce(random((100,), rank, torch.float32))
    assert all(torch.equal(y, total) for y in compat.all_gather(total))


@pytest.mark.ranks(3)
def test_no_gradient_and_own_part_on_request(rank):
    x = torch.ones(1, requires_grad=True)
    for call in (
        lambda grad: compat.broadcast(x, 0, grad=grad),
        lambda grad: compat.all_reduce(x, grad=grad),
        lambda grad: compat.all_gather(x, grad=grad)[0],
        lambda grad: compat._all_gather_base(torch.zeros(3), x, grad=grad),
    ):
        assert not call("none").requires_grad
        with torch.no_grad():
            assert not call("sum").requires_grad
    (own_part,) = grads(weighed(torch.cat(compat.all_gather(x, grad="same"))), [x])
    assert own_part.item() == rank + 1
    (own_part,) = grads(weighed(compat.all_reduce(x, grad="same")), [x])
    assert own_part.item() == rank + 1


@pytest.mark.ranks(2)
def test_compiles_where_the_original_refuses(rank):
    def step(x):
        return compat.all_reduce(x.sin()) + compat.broadcast(x, 1)

    x = random((4,), rank).requires_grad_()
    y = torch.compile(step, backend="eager", fullgraph=True)(x)
    (got,) = grads(loss(y, rank), [x])
    (want,) = grads(loss(step(x), rank), [x])
    same(got, want, "the compiled derivative")
