"""A loss that a loop repeats sends its row with the first gather: a message less, and the same errors."""

import itertools
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import allgrad as ag
from allgrad.collectives.all_reduce import all_reduce
from allgrad.errors import AllgradError, PieceMismatch
from allgrad.losses import (
    KeyQueue,
    maxsim_loss,
    multiple_negatives_loss,
    reference,
    sigmoid_supcon_loss,
    supcon_loss,
)
from allgrad.losses._expected_calls import History
from counting import Counted
from exactness import leaf
from losses.samples import COUNTS, features
from losses.test_supcon import check
from refusals import raises_everywhere

SCALE = torch.tensor(6.0, dtype=torch.float64)
LOSSES = {
    "supcon": lambda q, k, ids: supcon_loss(q, k, SCALE, ids, ids),
    "sigmoid": lambda q, k, ids: sigmoid_supcon_loss(q, k, SCALE, ids, ids),
    "negatives": lambda q, k, _: multiple_negatives_loss(q, k, SCALE),
    "both ways": lambda q, k, _: multiple_negatives_loss(q, k, SCALE, symmetric=True),
    "maxsim": lambda q, k, _: maxsim_loss(q[:, None], k[:, None], SCALE),
}


def inputs(rows, rank):
    return *(leaf(features((rows,), seed + rank)[0]) for seed in (1, 4)), torch.arange(rows)


def messages(step):
    with Counted() as calls:
        step()
    return len(calls)


@pytest.mark.ranks(3)
def test_a_step_of_a_loop_makes_three_calls(rank, world):
    """Keys with ids and the row; sums; gradients of keys with the weights of the loss."""
    for kind in ("equal", "ragged"):
        for name, loss in LOSSES.items():
            given = inputs(COUNTS[kind][rank], rank)
            made = [messages(lambda: loss(*given).backward()) for _ in range(5)]  # noqa: B023
            assert made[1:3] == [4, 4], (name, kind, made)
            assert made[3:] == [3, 3], (name, kind, made)
    with torch.no_grad():
        assert messages(lambda: loss(*given)) == 2


@pytest.mark.ranks(3)
def test_losses_in_turns_are_expected_too(rank, world):
    """A queue compares its arguments in a message of its own."""
    queue = KeyQueue(8, 5, dtype=torch.float64)
    query, key, ids = inputs(2, rank)
    steps = (
        lambda: supcon_loss(query, key, SCALE, ids, ids).backward(),
        lambda: multiple_negatives_loss(query, key, SCALE, queue=queue).backward(),
        lambda: queue.push(key.detach()),
    )
    made = [messages(step) for _ in range(8) for step in steps]  # full after some of them
    assert made[-3:] == [3, 3, 2], made


@pytest.mark.ranks(2)
def test_a_checkpoint_makes_a_call_again_that_was_expected_or_not(rank, world):
    query, key, ids = inputs(3, rank)
    for first, other in itertools.permutations(LOSSES.values(), 2):
        for _ in range(4):
            query.grad = None
            again = checkpoint(first, query, key, ids, use_reentrant=False)
            (again + 0 * other(query, key, ids)).backward()
            got, query.grad = query.grad, None
            first(query, key, ids).backward()
            torch.testing.assert_close(got, query.grad)


@pytest.mark.ranks(3)
def test_value_and_derivatives_when_sizes_stay_and_change(rank, world):
    for kind in ("empty", "empty", "empty", "empty", "ragged", "empty"):
        check(None, sigmoid=False, kind=kind, weighted=True)


@pytest.mark.ranks(3)
def test_one_rank_changes_its_batch(rank, world):
    for rows in (2, 2, 2, 2, 3, 2, 2):
        counts = (2, rows, 1)
        ids = [torch.arange(n) + r for r, n in enumerate(counts)]
        pieces = [features(counts, seed) for seed in (10, 20)]
        whole = [leaf(torch.cat(x)) for x in pieces]
        want = reference.supcon(*whole, SCALE, torch.cat(ids), torch.cat(ids))
        want.backward()
        own = [leaf(x[rank]) for x in pieces]
        got = supcon_loss(*own, SCALE, ids[rank], ids[rank])
        torch.testing.assert_close(got, want)
        got.backward()
        for x, y in zip(own, whole, strict=True):
            torch.testing.assert_close(x.grad, 3 * y.grad.split(counts)[rank])


@pytest.mark.ranks(3)
def test_mistakes_in_a_loop_raise_on_every_rank(rank, world):
    query, key, ids = inputs(2, rank)
    good = partial(supcon_loss, query, key, SCALE, ids, ids)
    wrong = {
        "query_ids has 1 entries": partial(supcon_loss, query, key, SCALE, ids[:1], ids),
        "the same dtype": partial(supcon_loss, query.float(), key.float(), SCALE, ids, ids),
        "the same width": partial(supcon_loss, query[:, 1:], key[:, 1:], SCALE, ids, ids),
        "call the same loss": partial(multiple_negatives_loss, query, key, SCALE),
    }
    for text, call in wrong.items():
        found = [good() for _ in range(4)]
        assert messages(good) == 2
        raises_everywhere(PieceMismatch, call if rank == 1 else good, text, "<-")
        torch.testing.assert_close(good(), found[0])
        with ag.checked(), ag.deadline(60):  # which needs a message of its own
            assert messages(lambda: good().backward()) == 4
            raises_everywhere(PieceMismatch, call if rank == 1 else good, text, "<-")
    with pytest.raises(AllgradError):  # no tensor at all: its own error
        supcon_loss("no", key, SCALE, ids, ids)


def test_only_what_followed_twice_is_expected():
    history = History()

    def add(*counts):
        return history.add([[n, 0] for n in counts], tuple((n,) for n in counts))

    for counts in ((1, 1), (1, 2), (1, 1), (1, 2)):
        add(*counts).payload = object()
        assert history.expected() is None
    add(1, 1)
    assert history.expected().counts == ((1,), (2,))
    add(3, 3)
    assert history.expected() is None
    add(1, 1)
    assert history.expected() is None
    history.forget()
    assert not history.after


@pytest.mark.ranks(3)
def test_a_rank_that_fails_alone_expects_what_the_others_do(rank, world):
    """Interrupted after its last message, while the others go on."""
    query, key, ids = inputs(2, rank)
    steps = (
        partial(supcon_loss, query, key, SCALE, ids, ids),
        partial(multiple_negatives_loss, query, key, SCALE),
    )
    want = [[step() for step in steps] for _ in range(5)][-1]

    def interrupted(*args, **options):
        all_reduce(*args, **options)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr("allgrad.losses._global_mean.all_reduce", interrupted)
        with pytest.raises(KeyboardInterrupt) if rank == 1 else nullcontext():
            steps[0]()
    assert messages(lambda: torch.testing.assert_close(steps[1](), want[1])) == 2
    assert messages(lambda: torch.testing.assert_close(steps[0](), want[0])) == 2
