"""Losses with several positives, over all ranks, against their formulas in one process."""

from functools import partial

import pytest
import torch

from allgrad.errors import InputError, PieceMismatch, TensorError
from allgrad.losses import (
    KeyQueue,
    multiple_negatives_loss,
    reference,
    siglip_loss,
    sigmoid_supcon_loss,
    supcon_loss,
)
from allgrad.losses._rows import recompute, relations
from exactness import leaf, place, random
from losses.kept_memory import largest_kept
from losses.samples import COUNTS, check_loss, features, ids_of
from places import on
from refusals import raises_everywhere

SCALE, BIAS = torch.tensor(6.0, dtype=torch.float64), torch.tensor(-2.0, dtype=torch.float64)
KEY_COUNTS = (2, 4, 0, 3)


def check(group, sigmoid, kind, reduction="mean", margin=None, weighted=False, queued=False):
    """Other numbers of queries than of keys on a rank."""
    rank, world = place(group)
    counts, keys = COUNTS[kind][:world], KEY_COUNTS[:world]
    loss, formula = (
        (sigmoid_supcon_loss, reference.sigmoid_supcon)
        if sigmoid
        else (supcon_loss, reference.supcon)
    )
    ids, key_ids = ids_of(counts, 1), ids_of(keys, 2)
    pieces = [features(counts, 10), features(keys, 20)]
    if weighted:
        pieces += [[x[:, 0].abs() + 0.1 for x in features(n, 30)] for n in (counts, keys)]
    numbers = [SCALE, BIAS] if sigmoid else [SCALE]
    queue = None
    old = torch.cat(features((4,), 40))
    old_ids = torch.cat(ids_of((4,), 41))
    if queued:
        queue = KeyQueue(7, 5, ids=True, group=group, dtype=torch.float64)
        queue.push(old if rank == 0 else old[:0], old_ids if rank == 0 else old_ids[:0])

    def options(weights, scalars):
        named = dict(zip(("query_weights", "key_weights"), weights, strict=False))
        return {"margin": margin, **named, **({"bias": scalars[1]} if sigmoid else {})}

    def run(own, scalars):
        q, k, *weights = own
        return loss(
            *(q, k, scalars[0], ids[rank], key_ids[rank]),
            **options(weights, scalars),
            queue=queue,
            group=group,
            grad_reduction=reduction,
        )

    def whole(everyone, scalars):
        q, k, *weights = (torch.cat(x) for x in everyone)
        all_ids = torch.cat(key_ids)
        if queued:
            k, all_ids = torch.cat([k, old]), torch.cat([all_ids, old_ids])
            weights[1:] = [torch.cat([w, torch.ones_like(old[:, 0])]) for w in weights[1:]]
        return formula(q, k, scalars[0], torch.cat(ids), all_ids, **options(weights, scalars))

    check_loss(group, run, whole, pieces, numbers, reduction)


def check_all(group):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relations, "TILE", (2, 3))
        for sigmoid in (False, True):
            for kind in COUNTS:
                check(group, sigmoid, kind)
            check(group, sigmoid, "ragged", reduction="sum")
            check(group, sigmoid, "ragged", margin=0.2)
            check(group, sigmoid, "empty", weighted=True, queued=True, margin=0.1)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("where", ["no world", "2 ranks", "3 ranks", "4 ranks"])
def test_equals_the_formula_with_two_derivatives(where):
    on(where, check_all)


@pytest.mark.ranks(3)
def test_one_set_of_samples_leaves_out_each_sample_itself(rank, world):
    counts = COUNTS["empty"][:world]
    labels = ids_of(counts, 1, most=3)

    def run(own, scalars):
        own_labels = labels[rank]
        return supcon_loss(*own, *own, *scalars, own_labels, own_labels, exclude_self=True)

    def whole(everyone, scalars):
        x, y = torch.cat(everyone[0]), torch.cat(labels)
        return reference.supcon(x, x, *scalars, y, y, exclude_self=True)

    check_loss(None, run, whole, [features(counts, 10)], [SCALE])


@pytest.mark.ranks(2)
def test_what_changes_after_the_call_is_not_seen(rank, world):
    """Neither keys that are pushed nor ids that are overwritten, however often backward runs."""
    q, k = (leaf(features((3,), seed + rank)[0]) for seed in (1, 5))
    queue = KeyQueue(8, 5, ids=True, dtype=torch.float64)
    queue.push(features((2,), 9)[0], torch.arange(2))
    want = []
    for change in (False, True):
        ids = torch.tensor([0, 1, 0])
        loss = supcon_loss(q, k, 5.0, ids, ids, queue=queue)
        if change:
            ids.copy_(torch.tensor([5, 6, 7]))
            queue.push(k.detach(), ids)
        for graph in (False, False, True):
            (got,) = torch.autograd.grad(loss, q, retain_graph=True, create_graph=graph)
            want.append(got.detach())
    for other in want[1:]:
        torch.testing.assert_close(other, want[0])


def test_a_query_whose_positives_weigh_nothing_does_not_count():
    q, k = features((3, 3), 1)
    ids, weights = torch.arange(3), torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64)
    given = q, k, SCALE, ids, ids
    want = reference.supcon(*given, key_weights=weights)
    torch.testing.assert_close(supcon_loss(*given, key_weights=weights), want)
    others = reference.supcon(q[1:], k, SCALE, ids[1:], ids, key_weights=weights)
    torch.testing.assert_close(want, others)


def test_a_query_whose_positives_weigh_less_than_nothing_does_not_count():
    q, k = features((4, 4), 1)
    ids, weights = torch.arange(4) // 2, torch.tensor([-2.0, 1.0, 1.0, 2.0], dtype=torch.float64)
    given = q, k, SCALE, ids, ids
    want = reference.supcon(*given, key_weights=weights)
    torch.testing.assert_close(supcon_loss(*given, key_weights=weights), want)


def test_one_positive_for_each_query_is_siglip():
    (q,), (k,) = features((6,), 1), features((6,), 2)
    got = sigmoid_supcon_loss(q, k, SCALE, torch.arange(6), torch.arange(6), bias=BIAS)
    torch.testing.assert_close(got, siglip_loss(q, k, SCALE, BIAS))


def test_equals_pytorch_metric_learning():
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    (x,), (labels,) = features((12,), 3), ids_of((12,), 4)
    got = supcon_loss(x, x, 10.0, labels, labels, exclude_self=True)
    torch.testing.assert_close(got, losses.SupConLoss(temperature=0.1)(x, labels))


def test_no_matrix_of_scores_is_kept():
    q, k = (leaf(torch.cat(features((300,), seed))) for seed in (1, 2))
    ids = torch.arange(300) % 40
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relations, "TILE", (64, 128))
        patch.setattr(recompute, "KEPT_SCORES", 300 * 300 - 1)
        for loss in (supcon_loss, sigmoid_supcon_loss):
            for order in (1, 2):
                assert largest_kept(partial(loss, q, k, 5.0, ids, ids), (q, k), order) <= 300 * 8


def test_gradients_of_chunks_are_added_in_float32():
    n, width = 300, 4
    query, key = (torch.nn.functional.normalize(random((n, width), i) + 1, dim=1) for i in (1, 2))
    given, ids = [x.bfloat16() for x in (query, key)], torch.arange(n) % 7
    wanted = [leaf(x.double()) for x in given]
    reference.supcon(*wanted, SCALE, ids, ids).backward()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relations, "TILE", (4, 4))
        own = [leaf(x) for x in given]
        supcon_loss(*own, SCALE, ids, ids).backward()
    for x, want in zip(own, wanted, strict=True):
        assert x.grad.dtype == torch.bfloat16
        assert (x.grad - want.grad).norm() < 5e-3 * want.grad.norm()


def test_a_margin_beyond_all_scores_leaves_out_every_negative():
    query, key = (x[0].float() for x in (features((5,), 1), features((5,), 2)))
    ids = torch.arange(5)
    for margin in (1e38, 1e39, 1e300):
        assert supcon_loss(query, key, 1.0, ids, ids, margin=margin) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.ranks(1, 3)
def test_ids_of_any_strides(rank, world, dtype):
    q, k = (random((3, 4), seed + rank).to(dtype) for seed in (1, 5))
    ids = torch.arange(3) % 2 + rank % 2
    table = torch.stack([ids, 7 * ids, ids], 1)
    same = {"a column": table[:, 0], "every other": torch.cat([table[:, 0:2]]).flatten()[::2]}
    for loss in (supcon_loss, sigmoid_supcon_loss):
        want = loss(q, k, 2.0, ids, ids)
        for strided in same.values():
            assert torch.equal(loss(q, k, 2.0, strided, strided), want)
        one, whole = torch.tensor([5]).expand(3), torch.full((3,), 5)
        assert torch.equal(loss(q, k, 2.0, one, one), loss(q, k, 2.0, whole, whole))
    column = partial(multiple_negatives_loss, q, k, 2.0, symmetric=True)
    assert torch.equal(column(ids=table[:, 0]), column(ids=ids))


@pytest.mark.ranks(3)
def test_bad_input_raises_on_every_rank(rank, world):
    q, k, ids = torch.ones(2, 4), torch.ones(3, 4), torch.arange(3)
    good = (q, k, 1.0, ids[:2], ids)
    wrong = {
        "3 entries for 2 rows of query": ((q, k, 1.0, ids, ids), {}, PieceMismatch),
        "missing on one side": ((q, k, 1.0, ids[:2], None), {}, InputError),
        "not a vector of whole": ((q, k, 1.0, ids[:2].float(), ids), {}, TensorError),
        "key has another width": ((q, k[:, :3], 1.0, ids[:2], ids), {}, PieceMismatch),
        "key has another dtype": ((q, k.double(), 1.0, ids[:2], ids), {}, PieceMismatch),
        "not a single finite": ((q, k, float("nan"), ids[:2], ids), {}, InputError),
        "one vector in each row": ((q[0], k, 1.0, ids[:2], ids), {}, TensorError),
        "other width": ((q[:, :3], k[:, :3], 1.0, ids[:2], ids), {}, PieceMismatch),
        "other options": (good, {"margin": 0.1}, PieceMismatch),
        "margin=0.1, grad_reduction=mean": (good, {"margin": 0.1}, PieceMismatch),
        "margin=nan": (good, {"margin": float("nan")}, InputError),
        "margin=tensor([0.1000, 0.2000])": (
            good,
            {"margin": torch.tensor([0.1, 0.2])},
            InputError,
        ),
        "exclude_self needs": (good, {"exclude_self": True}, PieceMismatch),
        "2 rows of query": (good, {"query_weights": torch.ones(4)}, PieceMismatch),
        "no grad_reduction": (good, {"grad_reduction": "avg"}, InputError),
        "of width 5": (good, {"queue": KeyQueue(2, 5, ids=True)}, PieceMismatch),
        "queue holds no ids": (good, {"queue": KeyQueue(2, 4)}, InputError),
    }
    for text, (given, options, error) in wrong.items():
        call = partial(supcon_loss, *given, **options) if rank == 1 else partial(supcon_loss, *good)
        raises_everywhere(error, call, text, "rank 1: ", "<-")
    same = (1, 1.0, torch.tensor([1.0]))[rank]
    assert torch.isfinite(supcon_loss(*good, margin=same, exclude_self=(0, False, 0)[rank]))
    close = torch.tensor(1.00001 if rank == 1 else 1.0)
    call = partial(supcon_loss, *good, margin=close)
    raises_everywhere(PieceMismatch, call, "margin=1.0000", "other options")
    several = torch.ones(2, 2) if rank == 1 else 0.1
    call = partial(supcon_loss, *good, margin=several)
    raises_everywhere(InputError, call, "Give a finite number, or None.", "rank 1: query (2, 4)")
    empty = partial(supcon_loss, q[:0], k[:0], 1.0, ids[:0], ids[:0])
    raises_everywhere(InputError, empty, "no rank has a query and a key")


@pytest.mark.ranks(3)
def test_ranks_may_weigh_the_loss_differently_and_go_back_twice(rank, world):
    """In the message of gradients, and once more step by step where the graph was kept."""
    counts = COUNTS["ragged"][:world]
    ids = ids_of(counts, 1)
    cases = (torch.float64, 1e-12, (1, 2, 3)), (torch.float16, 2e-3, (1, 2, 3))
    # A weight that is far smaller than the others does not make the gradients small.
    for dtype, near, weights in (*cases, (torch.float16, 2e-3, (1e-7, 1, 2))):
        pieces = [features(counts, seed, dtype=dtype) for seed in (10, 20)]
        whole = [leaf(torch.cat(x).double()) for x in pieces]
        everyone = torch.cat(ids)
        want = reference.supcon(*whole, SCALE, everyone, everyone) * 2.0**-16 * sum(weights)
        want = [g.split(counts)[rank] for g in torch.autograd.grad(want, whole)]
        own = [leaf(x[rank]) for x in pieces]
        loss = supcon_loss(*own, SCALE, ids[rank], ids[rank])
        loss_scale = 2.0**16  # keeps small gradients in 16 bits
        for retain in (True, False):
            weighed = loss * (2.0**-16 * weights[rank] * loss_scale)
            got = torch.autograd.grad(weighed, own, retain_graph=retain)
            for g, w in zip(got, want, strict=True):
                assert (g.double() / loss_scale - w).norm() <= near * w.norm()
