"""InfoNCE with in-batch, hard and queued negatives against its formula in one process."""

from functools import partial

import pytest
import torch

from allgrad.errors import InputError, PieceMismatch
from allgrad.losses import KeyQueue, info_nce_loss, multiple_negatives_loss, reference
from allgrad.losses._rows import recompute, relations
from exactness import leaf, place, random
from losses.kept_memory import largest_kept
from losses.samples import COUNTS, check_loss, features, ids_of
from places import on
from refusals import raises_everywhere

SCALE = torch.tensor(6.0, dtype=torch.float64)
HARD = (2, 0, 3, 1)


def check(
    group,
    kind,
    symmetric,
    with_ids=False,
    queued=True,
    margin=None,
    reduction="mean",
    with_hard=True,
    weighted=True,
):
    rank, world = place(group)
    counts, hard = COUNTS[kind][:world], HARD[:world] if with_hard else (0,) * world
    pieces = [features(counts, 10), features(counts, 20), features(hard, 30)]
    if weighted:
        pieces.append([x[:, 0].abs() + 0.1 for x in features(counts, 40)])
    ids, hard_ids = ids_of(counts, 1), ids_of(hard, 2)
    old, old_ids = torch.cat(features((4,), 50)), torch.cat(ids_of((4,), 51))
    queue = None
    if queued:
        queue = KeyQueue(6, 5, ids=with_ids, group=group, dtype=torch.float64)
        mine = slice(0, 4 if rank == 0 else 0)
        queue.push(old[mine], old_ids[mine] if with_ids else None)
    options = {"symmetric": symmetric, "margin": margin}

    def run(own, scalars):
        q, k, h, w = own if weighted else [*own, None]
        named = {"ids": ids[rank], "hard_negative_ids": hard_ids[rank]} if with_ids else {}
        return multiple_negatives_loss(
            *(q, k, *scalars),
            hard_negatives=h,
            queue=queue,
            weights=w,
            group=group,
            grad_reduction=reduction,
            **options,
            **named,
        )

    def whole(everyone, scalars):
        q, k, h, *weights = (torch.cat(x) for x in everyone)
        w = weights[0] if weighted else None
        negatives = torch.cat([h, old]) if queued else h
        named = {}
        if with_ids:
            all_ids = [*hard_ids, old_ids] if queued else hard_ids
            named = {"ids": torch.cat(ids), "negative_ids": torch.cat(all_ids)}
        return reference.multiple_negatives(
            q, k, *scalars, negatives=negatives, weights=w, **options, **named
        )

    check_loss(group, run, whole, pieces, [SCALE], reduction)


def check_all(group):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relations, "TILE", (2, 3))
        for symmetric in (False, True):
            check(group, "ragged", symmetric)
            check(group, "ragged", symmetric, queued=False, reduction="sum")
            check(group, "empty", symmetric, with_ids=True, margin=0.1)
            for with_hard in (False, True):  # pairs alone, as of info_nce_loss or clip_loss
                check(group, "ragged", symmetric, queued=False, weighted=False, with_hard=with_hard)
            check(group, "empty", symmetric, queued=False, weighted=False, with_hard=False)
        check(group, "equal", symmetric=True, with_ids=True)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("where", ["no world", "2 ranks", "3 ranks", "4 ranks"])
def test_equals_the_formula_with_two_derivatives(where):
    on(where, check_all)


@pytest.mark.ranks(2)
def test_hard_negatives_of_each_pair(rank, world):
    """(pairs, n, width), with ids (pairs, n)."""
    pairs, each = (2, 0)[rank], 3
    q, k = (random((pairs, 5), 10 * rank + i) for i in range(2))
    hard, ids = leaf(random((pairs, each, 5), 10 * rank + 2)), torch.arange(pairs * each)
    named = {"ids": torch.arange(pairs) + 4, "scale": SCALE}
    call = partial(multiple_negatives_loss, q, k, **named)
    got = call(hard_negatives=hard, hard_negative_ids=ids.view(pairs, each))
    flat = leaf(hard.detach().flatten(0, 1))
    want = call(hard_negatives=flat, hard_negative_ids=ids)
    torch.testing.assert_close(got, want)
    got.backward()
    want.backward()
    torch.testing.assert_close(hard.grad.flatten(0, 1), flat.grad)
    without = multiple_negatives_loss(
        q, k, **named, hard_negatives=flat[:0], hard_negative_ids=ids[:0]
    )
    assert (got - without).abs() > 1e-3


@pytest.mark.ranks(2)
def test_ids_that_are_overwritten_after_the_call_are_not_seen(rank, world):
    q, k = (leaf(features((3,), seed + rank)[0]) for seed in (1, 5))
    found = []
    for change in (False, True):
        ids = torch.tensor([0, 1, 0])
        loss = multiple_negatives_loss(q, k, 5.0, ids=ids, symmetric=True)
        if change:
            ids.copy_(torch.tensor([5, 6, 7]))
        for graph in (False, False, True):
            (got,) = torch.autograd.grad(loss, q, retain_graph=True, create_graph=graph)
            found.append(got.detach())
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


def test_without_further_options_is_info_nce():
    (q,), (k,), (h,) = features((6,), 1), features((6,), 2), features((4,), 3)
    got = multiple_negatives_loss(q, k, 9.0, hard_negatives=h)
    torch.testing.assert_close(got, info_nce_loss(q, k, 9.0, h))


@pytest.mark.parametrize("symmetric", [False, True])
def test_equals_sentence_transformers(symmetric):
    losses = pytest.importorskip("sentence_transformers.losses")
    util = pytest.importorskip("sentence_transformers.util")
    (q,), (k,), (h,) = features((6,), 1), features((6,), 2), features((6,), 3)
    if symmetric:
        whole = losses.MultipleNegativesSymmetricRankingLoss(
            None, scale=20.0, similarity_fct=util.cos_sim
        )
        got = multiple_negatives_loss(q, k, 20.0, symmetric=True)
        given = [q, k]
    else:
        whole = losses.MultipleNegativesRankingLoss(None, scale=20.0, similarity_fct=util.cos_sim)
        got = multiple_negatives_loss(q, k, 20.0, hard_negatives=h)
        given = [q, k, h]
    torch.testing.assert_close(got, whole.compute_loss_from_embeddings(given, None))


def test_no_matrix_of_scores_is_kept():
    q, k = (leaf(torch.cat(features((300,), seed))) for seed in (1, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relations, "TILE", (64, 128))
        patch.setattr(recompute, "KEPT_SCORES", 300 * 300 - 1)
        for order in (1, 2):
            run = partial(multiple_negatives_loss, q, k, 5.0, symmetric=True, margin=0.1)
            assert largest_kept(run, (q, k), order) <= 300 * 8


@pytest.mark.ranks(3)
def test_bad_input_raises_on_every_rank(rank, world):
    q, h, ids = torch.ones(2, 4), torch.ones(3, 4), torch.arange(3)
    wrong = {
        "2 and 3 rows": ((q, h, 1.0), {}, PieceMismatch),
        "3 entries for 2 rows": ((q, q, 1.0), {"ids": ids}, PieceMismatch),
        "but not for both": ((q, q, 1.0), {"ids": ids[:2], "hard_negatives": h}, InputError),
        "queue holds none": ((q, q, 1.0), {"ids": ids[:2], "queue": KeyQueue(2, 4)}, InputError),
        "of width 5": ((q, q, 1.0), {"queue": KeyQueue(2, 5)}, PieceMismatch),
        "hard_negatives has another width": (
            (q, q, 1.0),
            {"hard_negatives": h[:, :3]},
            PieceMismatch,
        ),
        "other options": ((q, q, 1.0), {"symmetric": True}, PieceMismatch),
    }
    for text, (given, options, error) in wrong.items():
        call = partial(multiple_negatives_loss, q, q, 1.0)
        if rank == 1:
            call = partial(multiple_negatives_loss, *given, **options)
        raises_everywhere(error, call, text, "rank 1: ", "<-")
    empty = partial(multiple_negatives_loss, q[:0], q[:0], 1.0)
    raises_everywhere(InputError, empty, "no rank has a pair")


@pytest.mark.ranks(3)
def test_a_rank_with_hard_negatives_only_takes_part_in_second_derivatives(rank, world):
    """Its queries are the only part of its message that has a gradient, and they are empty."""
    pairs, negatives = (3, 2, 0), (1, 0, 1)
    query, key, hard = random((5, 4), 1), random((5, 4), 2), random((2, 4), 3)

    def penalised(loss, x):
        (slope,) = torch.autograd.grad(loss(x), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), x)[0]

    whole = query.clone().requires_grad_()
    want = penalised(
        lambda x: 3 * reference.multiple_negatives(x, key, 2.0, negatives=hard, symmetric=True),
        whole,
    )
    own = query.split(pairs)[rank].clone().requires_grad_()
    options = {"hard_negatives": hard.split(negatives)[rank], "symmetric": True}
    got = penalised(
        lambda x: multiple_negatives_loss(x, key.split(pairs)[rank], 2.0, **options), own
    )
    torch.testing.assert_close(got, want.split(pairs)[rank], rtol=1e-10, atol=1e-12)
