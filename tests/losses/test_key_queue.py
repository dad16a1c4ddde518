"""The queue of earlier keys: the same on every rank, in rank order, part of the state."""

import warnings
from functools import partial

import pytest
import torch

import allgrad as ag
from allgrad.errors import InputError, ModeError, PieceMismatch, RankRaised
from allgrad.losses import KeyQueue, key_queue, multiple_negatives_loss, supcon_loss
from exactness import leaf
from losses.samples import features
from refusals import raises_everywhere


def keys(rank, step):
    """Keys that tell the step, the rank and the row."""
    rows = (2, 0, 3)[rank]
    return torch.tensor([[100.0 * step + 10 * rank + i, 0.0] for i in range(rows)]).reshape(rows, 2)


@pytest.mark.ranks(3)
def test_filled_and_dropped_in_rank_order(rank, world):
    queue = KeyQueue(8, 2, ids=True)
    assert not queue.filled.any()
    everything = []
    for step in (1, 2, 3):
        new = keys(rank, step)
        queue.push(new, new[:, 0].long())
        everything += [x for r in range(world) for x in keys(r, step)[:, 0].tolist()]
        want = everything[-8:]
        assert queue.features[queue.filled][:, 0].tolist() == want
        assert queue.ids[queue.filled].tolist() == want
    queue.push(torch.zeros(9, 2), torch.zeros(9).long())  # more than fit
    assert not queue.features.any()


@pytest.mark.ranks(2)
def test_a_push_that_fails_changes_nothing(rank, world, monkeypatch):
    """Interrupted between its two messages, of keys and of ids: these still belong together."""
    queue = KeyQueue(4, 2, ids=True)
    queue.push(keys(rank, 1), torch.full((len(keys(rank, 1)),), rank))
    before = [x.clone() for x in queue.state_dict().values()]
    gather, calls = key_queue.all_gather, []

    def interrupted(*args, **options):
        calls.append(gather(*args, **options))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return calls[-1]

    monkeypatch.setattr(key_queue, "all_gather", interrupted)
    with pytest.raises(KeyboardInterrupt):
        queue.push(keys(rank, 2), torch.full((len(keys(rank, 2)),), rank))
    for x, y in zip(queue.state_dict().values(), before, strict=True):
        assert torch.equal(x, y)


@pytest.mark.ranks(2)
def test_state_is_stored_and_loaded(rank, world):
    queue, other = (KeyQueue(6, 2, ids=True) for _ in range(2))
    queue.push(torch.full((2, 2), float(rank)), torch.tensor([rank, rank]))
    other.load_state_dict(queue.state_dict())
    for one in (queue, other):
        one.push(torch.full((1, 2), 5.0 + rank), torch.tensor([5]))
    assert torch.equal(queue.features, other.features)
    assert torch.equal(queue.ids, other.ids)
    assert other.filled.tolist() == [True] * 6


@pytest.mark.ranks(2)
def test_pushed_in_inference_mode_it_serves_losses_outside(rank, world):
    q, k = (leaf(features((3,), seed + rank)[0]) for seed in (1, 5))
    keys, found = features((2,), 9 + rank)[0], []
    for push_in in (torch.no_grad(), torch.inference_mode()):
        queue = KeyQueue(4, 5, ids=True, dtype=torch.float64)
        with push_in:
            queue.push(keys * 1, torch.arange(2))
        (gradient,) = torch.autograd.grad(multiple_negatives_loss(q, k, 5.0, queue=queue), q)
        found.append((queue.features, queue.ids, queue.count, gradient))
    assert all(map(torch.equal, *found))


@pytest.mark.ranks(2)
def test_push_before_backward_leaves_the_gradient(rank, world):
    q, k = (leaf(features((3,), seed + rank)[0]) for seed in (1, 5))
    queue = KeyQueue(4, 5, dtype=torch.float64)
    queue.push(features((2,), 9)[0])
    multiple_negatives_loss(q, k, 5.0, queue=queue).backward()
    want, q.grad = q.grad, None
    loss = multiple_negatives_loss(q, k, 5.0, queue=queue)
    queue.push(k)
    loss.backward(retain_graph=True)
    assert torch.equal(q.grad, want)
    for graph in (False, True):  # computed again
        (again,) = torch.autograd.grad(loss, q, retain_graph=True, create_graph=graph)
        torch.testing.assert_close(again, want)
    assert not queue.features.requires_grad


CHANGES = {
    "features": lambda queue: queue.features.zero_(),
    "ids": lambda queue: queue.ids.add_(1),
    "load_state_dict": lambda queue: queue.load_state_dict(queue.state_dict()),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.ranks(3)
def test_a_queue_changed_in_place_before_backward_raises(rank, world, change):
    q, k = (leaf(features((3,), seed + rank)[0]) for seed in (1, 5))
    ids = torch.arange(3) + rank
    for call in (
        lambda queue: multiple_negatives_loss(q, k, 5.0, queue=queue, ids=ids),
        lambda queue: supcon_loss(q, k, 5.0, ids, ids, queue=queue),
    ):
        for first, graph in ((False, False), (False, True), (True, False), (True, True)):
            queue = KeyQueue(4, 5, ids=True, dtype=torch.float64)
            queue.push(features((2,), 9)[0], torch.arange(2))
            loss = call(queue)
            if first:  # a graph kept for more
                torch.autograd.grad(loss, q, retain_graph=True)
            CHANGES[change](queue)
            gradient = partial(torch.autograd.grad, loss, q, create_graph=graph)
            raises_everywhere(RuntimeError, gradient, "modified by an inplace operation")


@pytest.mark.ranks(3)
def test_in_checked_mode_a_queue_changed_on_one_rank_raises_on_all(rank, world):
    q = leaf(features((3,), rank)[0])
    queue = KeyQueue(4, 5, dtype=torch.float64)
    with ag.checked():
        loss = multiple_negatives_loss(q, q.cos(), 5.0, queue=queue)
        if rank == 1:
            queue.features.zero_()
        error = ModeError if rank == 1 else RankRaised
        gradient = partial(torch.autograd.grad, loss, q)
        raises_everywhere(error, gradient, "modified by an inplace operation")


@pytest.mark.ranks(2)
def test_a_queue_changed_in_place_raises_also_where_hooks_save_the_tensors(rank, world):
    q = leaf(features((3,), rank)[0])
    queue = KeyQueue(4, 5, dtype=torch.float64)
    with torch.autograd.graph.save_on_cpu():
        loss = multiple_negatives_loss(q, q.cos(), 5.0, queue=queue)
    queue.features.zero_()
    gradient = partial(torch.autograd.grad, loss, q)
    raises_everywhere(RuntimeError, gradient, "modified by an inplace operation")


@pytest.mark.ranks(3)
def test_bad_input_raises_on_every_rank(rank, world):
    queue = KeyQueue(4, 2)
    wrong = {
        "of width 2, not 3": (torch.ones(1, 3), None, PieceMismatch),
        "holds no ids": (torch.ones(1, 2), torch.zeros(1).long(), InputError),
        "2 entries for 1 rows": (torch.ones(1, 2), torch.zeros(2).long(), PieceMismatch),
        "other dtype": (torch.ones(1, 2).double(), None, PieceMismatch),
    }
    for text, (key, ids, error) in wrong.items():
        given = (key, ids) if rank == 2 else (torch.ones(1, 2), None)
        raises_everywhere(error, partial(queue.push, *given), text, "rank 2: ", "<-")
    assert not queue.filled.any()


@pytest.mark.parametrize("capacity", [0, -1, 2.5, "2", None])
def test_a_capacity_that_is_no_positive_whole_number_is_refused(capacity):
    with pytest.raises(InputError, match=f"capacity={capacity!r}"):
        KeyQueue(capacity, 4)
    with pytest.raises(InputError, match=f"width={capacity!r}"):
        KeyQueue(4, capacity)


@pytest.mark.ranks(3)
def test_a_push_in_a_compiled_function_is_a_graph_break(rank, world):
    made = [KeyQueue(5, 4, ids=True, dtype=torch.float64) for _ in range(2)]

    def step(queue, x, ids):
        loss = multiple_negatives_loss(x, x.cos(), 3.0, queue=queue, ids=ids)
        queue.push(x.detach() * 2, ids)
        return loss + 1

    compiled = torch.compile(step, backend="aot_eager")
    for number in range(3):
        x = features((rank + 1,) * world, number, 4)[rank]
        ids = torch.arange(rank + 1) + 10 * number
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Dynamo does not know")
            got = compiled(made[0], x, ids)
        torch.testing.assert_close(got, step(made[1], x, ids))
        for name in ("features", "ids", "count"):
            torch.testing.assert_close(getattr(made[0], name), getattr(made[1], name))

    def pushed(x, ids):
        made[0].push(x, ids)
        return x + 1

    whole = torch.compile(pushed, backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match=r"KeyQueue\.push"):
        whole(x, ids)


@pytest.mark.ranks(3)
def test_a_queue_on_one_rank_only_is_shown(rank, world):
    x, ids = torch.ones(2, 4), torch.arange(2)
    queue = KeyQueue(3, 4, ids=True) if rank == 1 else None
    for loss in (
        partial(supcon_loss, x, x, 1.0, ids, ids),
        partial(multiple_negatives_loss, x, x, 1.0),
    ):
        raises_everywhere(
            PieceMismatch, partial(loss, queue=queue), "same queue", "queue of 3   <-", "no queue"
        )


@pytest.mark.ranks(3)
def test_a_queue_that_differs_between_ranks_is_noticed(rank, world):
    queue = KeyQueue(6, 4, ids=True)
    queue.push(torch.ones(1, 4), torch.zeros(1).long())
    saved = {name: x.clone() for name, x in queue.state_dict().items()}
    if rank == 1:  # as after a checkpoint that one rank loads alone
        queue.load_state_dict({**saved, "count": torch.tensor(6)})
    push = partial(queue.push, torch.ones(1, 4), torch.zeros(1).long())
    raises_everywhere(PieceMismatch, push, "rank 1: ", "queue of 6, full  ", "other queue")

    queue.load_state_dict(saved)
    x, ids = torch.eye(4)[:2].requires_grad_(), torch.arange(2)
    losses = (
        partial(multiple_negatives_loss, x, x, 5.0, queue=queue, ids=ids),
        partial(supcon_loss, x, x, 5.0, ids, ids, queue=queue),
        push,
    )
    with ag.checked():
        for call in losses:
            call()
        for name in ("features", "ids"):
            if rank == 1:
                other = getattr(queue, name) + 1
                queue.load_state_dict({**queue.state_dict(), name: other})
            for call in losses:
                raises_everywhere(PieceMismatch, call, "rank 1: ", "checksum", "other queue")
            ag.module_state.sync(queue)
            losses[0]()
        for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.float64):
            KeyQueue(4, 4, dtype=dtype).push(torch.ones(1, 4))


def test_a_queue_made_in_inference_mode_serves_a_loss_with_a_gradient():
    with torch.inference_mode():
        queue = KeyQueue(4, 2)
    x = torch.randn(3, 2, requires_grad=True)
    multiple_negatives_loss(x, x.detach(), 1.0, queue=queue).backward()
    assert x.grad.isfinite().all()
