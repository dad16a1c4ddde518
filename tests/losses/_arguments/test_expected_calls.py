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
    clip_loss,
    info_nce_loss,
    maxsim_loss,
    multiple_negatives_loss,
    reference,
    siglip_loss,
    sigmoid_supcon_loss,
    supcon_loss,
)
from allgrad.losses._arguments import packed
from allgrad.losses._arguments.expected_calls import History
from allgrad.losses._pairs import engine, whole_pass
from allgrad.losses._pairs.first_order import loss_value
from counting import Counted
from exactness import leaf
from losses.samples import COUNTS, features
from losses.test_supcon import check
from refusals import raises_everywhere

SCALE = torch.tensor(6.0, dtype=torch.float64)
PAIRED = {
    "clip": clip_loss,
    "siglip": lambda q, k, scale: siglip_loss(q, k, scale, -scale),
    "info_nce": info_nce_loss,
    "hard negatives": lambda q, k, scale: info_nce_loss(q, k, scale, k[:1].detach()),
    "multiple negatives": multiple_negatives_loss,
    "both ways": partial(multiple_negatives_loss, symmetric=True),
}
FORMULAS = {
    "clip": reference.clip,
    "siglip": lambda q, k, scale: reference.siglip(q, k, scale, -scale),
    "info_nce": reference.info_nce,
    "multiple negatives": reference.info_nce,
    "both ways": reference.clip,
}
LOSSES = {
    "supcon": lambda q, k, ids: supcon_loss(q, k, SCALE, ids, ids),
    "sigmoid": lambda q, k, ids: sigmoid_supcon_loss(q, k, SCALE, ids, ids),
    "negatives": lambda q, k, ids: multiple_negatives_loss(q, k, SCALE, ids=ids),
    "both ways": lambda q, k, ids: multiple_negatives_loss(q, k, SCALE, ids=ids, symmetric=True),
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
    with torch.no_grad():  # another row: grad mode is compared too
        assert [messages(lambda: loss(*given)) for _ in range(5)][3:] == [2, 2]


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.ranks(3)
def test_a_step_of_clip_and_its_like_makes_a_call_less_in_a_loop(rank, world, small, monkeypatch):
    """Keys and the row; sums; gradients of keys with the weights. The scale is another one in each step."""
    if not small:
        monkeypatch.setattr(whole_pass, "SMALL_UP_TO", 0)
    for kind in ("equal", "ragged"):
        for name, loss in PAIRED.items():
            query, key, _ = inputs(COUNTS[kind][rank], rank)
            scales = [torch.tensor(2.0 + step / 8, requires_grad=True) for step in range(5)]
            made = [messages(lambda: loss(query, key, x).backward()) for x in scales]  # noqa: B023
            least = 2 if small and name != "hard negatives" else 3
            assert made[1:] == [least + 1, least + 1, least, least], (name, kind, made)
    loss = PAIRED["hard negatives"]
    with torch.no_grad():
        found = [messages(lambda: loss(query, key, 2.0)) for _ in range(5)]
    assert found[1:] == [3, 3, 2, 2], found


@pytest.mark.ranks(3)
def test_large_messages_and_rings_compare_arguments_apart(rank, world, monkeypatch):
    monkeypatch.setattr(whole_pass, "SMALL_UP_TO", 0)
    query, key, _ = inputs(3, rank)
    for limit, ring in ((0, False), (2**20, True)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(packed, "ROW_BESIDE_ON_CPUS", limit)
            made = [messages(clip_loss(query, key, 3.0, ring=ring).backward) for _ in range(5)]
            calls = [messages(lambda: clip_loss(query, key, 3.0, ring=ring)) for _ in range(5)]  # noqa: B023
        assert len({*made}) == 1
        assert len({*calls}) == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("small", [False, True])
@pytest.mark.ranks(3)
def test_one_rank_changes_its_pairs(rank, world, small, dtype, monkeypatch):
    """Expected calls that come and that do not: value and gradients of the joined batch."""
    if not small:
        monkeypatch.setattr(whole_pass, "SMALL_UP_TO", 0)
    near = 1e-12 if dtype == torch.float64 else 1e-2
    for name, formula in FORMULAS.items():
        for step, rows in enumerate((2, 2, 2, 2, 3, 2, 0, 2, 2, 2, 2)):
            counts = (2, rows, 1)
            pieces = [[x.to(dtype) for x in features(counts, seed + step)] for seed in (10, 50)]
            whole = [leaf(torch.cat(x).double()) for x in pieces]
            scale = torch.tensor(2.0 + step / 8, dtype=torch.float64)
            want = formula(*whole, scale)
            want.backward()
            own = [leaf(x[rank]) for x in pieces]
            got = PAIRED[name](*own, scale)
            assert abs(got.double() - want) <= near / 10 * want
            got.backward()
            for x, y in zip(own, whole, strict=True):
                mine = 3 * y.grad.split(counts)[rank]
                assert (x.grad.double() - mine).norm() <= near * y.grad.norm()


@pytest.mark.ranks(3)
def test_mistakes_in_a_loop_of_pairs_raise_on_every_rank(rank, world):
    """In turns with losses whose rows have another length."""
    query, key, ids = inputs(2, rank)
    good = partial(clip_loss, query, key, 3.0)
    others = partial(supcon_loss, query, key, 3.0, ids, ids)
    want = good()
    wrong = {
        "same number of rows": partial(clip_loss, query[:1], key, 3.0),
        "scale is nan": partial(clip_loss, query, key, float("nan")),
        "another loss": partial(siglip_loss, query, key, 3.0),
        "other options": partial(clip_loss, query, key, 3.0, label_smoothing=0.1),
        "the same dtype": partial(clip_loss, query.float(), key.float(), 3.0),
    }
    for text, call in wrong.items():
        for _ in range(4):
            good()
        assert messages(good) == 1  # a small batch: queries and keys, and the row
        raises_everywhere(AllgradError, call if rank == 2 else good, text, "rank 2: ", "<-")
        torch.testing.assert_close(good(), want)
        with ag.checked(), ag.deadline(60):
            assert messages(good) >= 2
    made = [[messages(call) for call in (good, others)] for _ in range(5)]
    assert made[-1] == [1, 2], made


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


@pytest.mark.ranks(2)
def test_a_transform_before_leaves_no_message_to_expect(rank, world):
    """Of pairs alone it gathers other tensors, inside torch.func and outside of it."""
    query, key, _ = inputs(4, rank)

    def step(rows=4):
        return multiple_negatives_loss(query[:rows], key[:rows], 5.0)

    for _ in range(2):
        torch.func.grad(lambda q: multiple_negatives_loss(q, key.detach(), 5.0))(query.detach())
        found = [step() for _ in range(4)]
        step(3 if rank == 1 else 4)
        torch.testing.assert_close(step(), found[0])


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
        partial(multiple_negatives_loss, query, key, SCALE, margin=0.1),
    )
    want = [[step() for step in steps] for _ in range(5)][-1]

    def interrupted(*args, **options):
        all_reduce(*args, **options)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr("allgrad.losses._rows.global_mean.all_reduce", interrupted)
        with pytest.raises(KeyboardInterrupt) if rank == 1 else nullcontext():
            steps[0]()
    assert messages(lambda: torch.testing.assert_close(steps[1](), want[1])) == 2
    assert messages(lambda: torch.testing.assert_close(steps[0](), want[0])) == 2


@pytest.mark.ranks(2)
def test_a_rank_that_fails_alone_in_a_ring_expects_what_the_others_do(rank, world, monkeypatch):
    """No call around a ring is expected, but others are by what came before it."""
    monkeypatch.setattr(whole_pass, "SMALL_UP_TO", 0)
    query, key, _ = inputs(3, rank)
    gathered, ring = (partial(clip_loss, query, key, 3.0, ring=ring) for ring in (False, True))
    want = [(gathered(), ring()) for _ in range(4)][-1]
    gathered()

    def interrupted(*args):
        loss_value(*args)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(engine, "loss_value", interrupted)
        with pytest.raises(KeyboardInterrupt) if rank == 1 else nullcontext():
            ring()
    for _ in range(2):
        torch.testing.assert_close((gathered(), ring()), want)


@pytest.mark.ranks(2)
def test_features_without_width_in_a_loop(rank, world, monkeypatch):
    for small in (2**21, 0):
        monkeypatch.setattr(whole_pass, "SMALL_UP_TO", small)
        for _ in range(6):
            query, key = (torch.zeros(2 + rank, 0, requires_grad=True) for _ in range(2))
            loss = clip_loss(query, key, 3.0)
            loss.backward()
            torch.testing.assert_close(loss.detach(), torch.tensor(5.0).log())
            assert query.grad.shape == (2 + rank, 0)
