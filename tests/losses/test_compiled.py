"""Losses in compiled graphs: one op each way, which runs the eager loss."""

import gc
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

import allgrad as ag
from allgrad import losses
from allgrad.errors import ModeError, PieceMismatch
from allgrad.losses._graphs import graph_op
from counting import Counted
from exactness import random

ROWS = (3, 0, 2)
HIDDEN = random((5, 6), 8)


def inputs(rows, seed):
    """Features, and a scale, of a rank; words of a vocabulary."""
    made = [normalize(random((n, 6), seed + i), dim=1) for i, n in enumerate((rows, rows, 4))]
    numbers = [torch.tensor(7.5, dtype=torch.float64), torch.tensor(-2.5, dtype=torch.float64)]
    return [x.requires_grad_() for x in (*made, *numbers)]


def every_loss(q, k, words, scale, bias, queue):
    ids, targets = torch.arange(len(q)), torch.arange(5) % 4
    return [
        losses.clip_loss(2 * q, k, scale, label_smoothing=0.1),
        losses.siglip_loss(q, k, scale, bias),
        losses.info_nce_loss(q, k, scale, k[:1], grad_reduction="sum", ring=True),
        losses.supcon_loss(q, k, scale, ids, ids, queue=queue, margin=0.1),
        losses.sigmoid_supcon_loss(q, k, scale, ids, ids, bias=-1.0),
        losses.multiple_negatives_loss(q, k, 5.0, queue=queue, symmetric=True),
        losses.maxsim_loss(q[:, None], k[:, None], scale),
        losses.cross_entropy(HIDDEN, words, targets, label_smoothing=0.1),
        *losses.cross_entropy(HIDDEN, words, targets, reduction="none"),
    ]


def filled_queue():
    queue = losses.KeyQueue(4, 6, ids=True, dtype=torch.float64)
    queue.push(random((2, 6), 77), torch.tensor([1, 9]))
    return queue


def step(loss, rank, queue, *, rows=None, detached=()):
    given = inputs(ROWS[rank] if rows is None else rows, 10 * rank)
    given = [x.detach() if i in detached else x for i, x in enumerate(given)]
    with Counted() as calls:
        found = loss(*given, queue)
        sum((i + 1 + rank) * one for i, one in enumerate(found)).backward()
    return [x.detach() for x in found], [x.grad for x in given], calls


@pytest.mark.ranks(3, timeout=230)
@pytest.mark.timeout(240)
def test_every_loss_equals_the_eager_one(rank):
    """Rank 0 of three runs eagerly. Tracing sends nothing, or a call would be counted twice."""
    queue = filled_queue()
    compiled = torch.compile(every_loss, fullgraph=True, backend="aot_eager")
    used = every_loss if rank == 0 else compiled
    for detached in ((), (1,) if rank == 2 else (0,)):  # a rank without a gradient takes part
        for _ in range(4):  # from then on the losses are expected (expected_calls)
            step(every_loss, rank, queue, detached=detached)
        want = step(every_loss, rank, queue, detached=detached)
        got = step(used, rank, queue, detached=detached)
        assert got[2] == want[2]
        torch.testing.assert_close(got[:2], want[:2], rtol=1e-13, atol=1e-13)
    assert not graph_op._graphs


@pytest.mark.ranks(3, timeout=230)
@pytest.mark.timeout(240)
def test_new_sizes_take_no_new_graph(rank):
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, example)

    def pair(q, k, _words, scale, _bias, _queue, sizes=None):
        return [losses.clip_loss(q, k, scale), losses.siglip_loss(q, k, scale, sizes=sizes)]

    compiled = torch.compile(pair, fullgraph=True, backend=backend)
    for turn in range(4):
        counts = [2 + (r + turn) % 4 for r in range(3)]
        want = step(partial(pair, sizes=counts), rank, None, rows=counts[rank])
        got = step(partial(compiled, sizes=counts), rank, None, rows=counts[rank])
        assert got[2] == want[2]
        torch.testing.assert_close(got[:2], want[:2], rtol=1e-13, atol=1e-13)
    assert len(graphs) <= 3


@pytest.mark.ranks(3, timeout=230)
@pytest.mark.timeout(240)
def test_checked_and_deadline_hold_around_compiled_losses(rank):
    def loss(q, k, scale, wrong):
        found = losses.supcon_loss(q, k, scale, torch.arange(3), torch.arange(3)[: 3 - wrong])
        return found + losses.clip_loss(q, k, scale)

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    used = loss if rank == 1 else compiled
    q, k, _, scale, _ = inputs(3, rank)
    with ag.checked(), ag.deadline(200):
        used(q, k, scale, 0).backward()
        with pytest.raises(PieceMismatch, match=r"rank 2: .*key_ids has 2 entries"):
            used(q, k, scale, int(rank == 2))
    assert q.grad.abs().sum() > 0


ASK_TWICE = {
    "backward()": lambda first, _: first.sum().backward(),
    "backward(inputs=)": lambda first, x: first.sum().backward(inputs=[x]),
    "autograd.grad": lambda first, x: torch.autograd.grad(first.sum(), x),
    "grad of a sum with the loss": lambda first, x: torch.autograd.grad(first.sum() + x.sum(), x),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_second_derivatives_are_refused_in_every_way_of_asking(backend):
    """By us, or by torch.compile itself: a part that is left out in silence would be the worst."""
    for name in ("clip_loss", "maxsim_loss"):  # the second is given a view of the input
        loss = getattr(losses, name)
        shape = (3, 1, -1) if name == "maxsim_loss" else (3, -1)

        def called(q, k, scale, loss=loss, shape=shape):
            return loss(q.reshape(shape), k.reshape(shape), scale)

        compiled = torch.compile(called, fullgraph=True, backend=backend)

        def twice(ask, compiled=compiled):
            q, k, _, scale, _ = inputs(3, 0)
            ask(torch.autograd.grad(compiled(q, k, scale), q, create_graph=True)[0], q)

        # The last is torch's own, from 2.14 on.
        refusal = "first derivatives only|double backward|requires create_graph=False"
        for ask in ASK_TWICE.values():
            with pytest.raises((ModeError, RuntimeError), match=refusal):
                twice(ask)


def test_graph_knows_the_dtype_of_a_loss():
    """Inductor reads the memory of a loss in that dtype, whatever it holds."""
    q, k, *_ = inputs(3, 0)
    single, ids, double = (
        [x.detach().float() for x in (q, k)],
        torch.arange(3),
        torch.ones(3).double(),
    )
    calls = [
        lambda: losses.clip_loss(scale=torch.tensor(5.0), text=k, image=q),
        lambda: losses.cross_entropy(targets=ids, weight=k, hidden=q),
        lambda: losses.supcon_loss(*single, 5.0, ids, ids, query_weights=double),
        lambda: losses.multiple_negatives_loss(*single, 5.0, weights=double),
    ]

    def found():
        return [(loss, torch.empty(0, dtype=loss.dtype)) for loss in [call() for call in calls]]

    for loss, known in torch.compile(found, fullgraph=True, backend="aot_eager")():
        assert loss.dtype == known.dtype


def test_another_python_number_is_another_graph():
    q, k, words, *_ = inputs(3, 0)

    def loss(scale, ignored):
        targets = torch.arange(3)
        return losses.clip_loss(q, k, scale) + losses.cross_entropy(
            q, words, targets, ignore_index=ignored
        )

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for numbers in ((5.0, 0), (7.5, 2), (2.5, 1)):
        torch.testing.assert_close(compiled(*numbers), loss(*numbers), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int64])
def test_numbers_of_numpy_are_inputs_of_one_graph(kind):
    q, k, words, *_ = inputs(3, 0)

    def loss(scale):
        found = losses.siglip_loss(q, k, scale, scale)
        found = found + losses.multiple_negatives_loss(q, k, scale, margin=scale)
        return found + losses.cross_entropy(q, words, torch.arange(3), label_smoothing=kind(1))

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for number, stance in ((3, "default"), (5, "fail_on_recompile")):
        want = loss(kind(number))
        with torch.compiler.set_stance(stance):
            torch.testing.assert_close(compiled(kind(number)), want, rtol=1e-13, atol=1e-13)


@pytest.mark.ranks(2)
def test_func_of_a_loss_falls_back_to_eager_code(rank):
    """TorchDynamo can break no graph inside torch.func, and must not trace what the loss sends."""
    q, k, _, scale, _ = (x.detach() for x in inputs(ROWS[rank], rank))
    first = torch.func.grad(losses.clip_loss)
    got = torch.compile(first, backend="aot_eager")(q, k, scale)
    torch.testing.assert_close(got, first(q, k, scale), rtol=1e-13, atol=1e-13)
    torch.compiler.reset()  # TorchDynamo gave up on clip_loss, in this process of several tests


def test_a_loss_that_falls_back_leaves_the_others_compiled():
    q, k, _, scale, bias = (x.detach() for x in inputs(3, 0))
    torch.compile(torch.func.grad(losses.clip_loss), backend="aot_eager")(q, k, scale)
    compiled = torch.compile(losses.siglip_loss, fullgraph=True, backend="aot_eager")
    want = losses.siglip_loss(q, k, scale, bias)
    torch.testing.assert_close(compiled(q, k, scale, bias), want, rtol=1e-13, atol=1e-13)
    torch.compiler.reset()


def test_graph_dropped_without_backward_is_freed():
    q, k, _, scale, _ = inputs(3, 0)
    compiled = torch.compile(losses.siglip_loss, fullgraph=True, backend="aot_eager")
    loss = compiled(q, k, scale)
    gc.collect()
    assert len(graph_op._graphs) == 1
    del loss
    gc.collect()
    assert not graph_op._graphs
    with torch.no_grad():
        assert not compiled(q, k, scale).requires_grad
    assert not graph_op._graphs


@pytest.mark.parametrize("sizes", [torch.tensor([3]), np.array([3])])
def test_sizes_that_are_no_ints_are_named(sizes):
    x = torch.randn(3, 4)
    compiled = torch.compile(
        partial(losses.clip_loss, sizes=sizes), backend="aot_eager", fullgraph=True
    )
    with pytest.raises(Exception, match="Give ints in a compiled function"):
        compiled(x, x, 1.0)
