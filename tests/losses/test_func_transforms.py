"""The losses in chunks under nestings of torch.func, against their formulas in one process."""

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jacrev, vmap

import allgrad as ag
from allgrad.errors import ModeError
from allgrad.losses import (
    KeyQueue,
    clip_loss,
    cross_entropy,
    maxsim,
    maxsim_loss,
    multiple_negatives_loss,
    reference,
    sigmoid_supcon_loss,
    supcon_loss,
)
from allgrad.losses._rows import relations, vocabulary
from exactness import random
from losses.samples import features, ids_of
from refusals import raises_everywhere

ROWS, WIDTH = 3, 4
TIGHT = {"rtol": 1e-10, "atol": 1e-12}
SCALE = 3.0


def supcon(rank, world, **options):
    keys, ids = features((2, 4, 3)[:world], 20, WIDTH), ids_of((ROWS,) * world, 1)
    key_ids = ids_of((2, 4, 3)[:world], 2)
    queue = KeyQueue(4, WIDTH, ids=True, dtype=torch.float64)
    old = [x[:1] for x in features((1,) * world, 40, WIDTH)]
    queue.push(old[rank], ids[rank][:1])
    everyone = torch.cat([*keys, *old]), torch.cat([*key_ids, *(x[:1] for x in ids)])

    def run(x):
        given = keys[rank], SCALE, ids[rank], key_ids[rank]
        return supcon_loss(x, *given, queue=queue, **options)

    def formula(xs):
        return reference.supcon(
            xs.flatten(0, 1), everyone[0], SCALE, torch.cat(ids), everyone[1], **options
        )

    return run, formula


def sigmoid(rank, world):
    ids = ids_of((ROWS,) * world, 1)

    def run(x):
        return sigmoid_supcon_loss(x, x.sin(), SCALE, ids[rank], ids[rank], bias=-1.0)

    def formula(xs):
        x = xs.flatten(0, 1)
        return reference.sigmoid_supcon(
            x, x.sin(), SCALE, torch.cat(ids), torch.cat(ids), bias=-1.0
        )

    return run, formula


def negatives(rank, world):
    ids, hard = ids_of((ROWS,) * world, 1), features((1, 0, 2)[:world], 30, WIDTH)
    hard_ids = [torch.full((len(x),), -1) for x in hard]
    options = {"symmetric": True, "margin": 0.1}

    def run(x):
        given = {
            "ids": ids[rank],
            "hard_negatives": hard[rank],
            "hard_negative_ids": hard_ids[rank],
        }
        return multiple_negatives_loss(x, x.cos(), SCALE, **given, **options)

    def formula(xs):
        x = xs.flatten(0, 1)
        given = zip(("ids", "negatives", "negative_ids"), (ids, hard, hard_ids), strict=True)
        joined = {name: torch.cat(pieces) for name, pieces in given}
        return reference.multiple_negatives(x, x.cos(), SCALE, **joined, **options)

    return run, formula


def late_interaction(rank, world):
    documents = [features((r + 1, 2, 4), 50 + r, WIDTH) for r in range(world)]

    def run(x):
        return maxsim_loss(x.unsqueeze(1).sin(), documents[rank], SCALE, symmetric=True)

    def formula(xs):
        tokens = [x[None].sin() for x in xs.flatten(0, 1)]
        every = [x for one in documents for x in one]
        return reference.maxsim(tokens, every, SCALE, symmetric=True)

    return run, formula


def words(rank, world, sizes=None):
    hidden = random((5, WIDTH), 60)
    targets = torch.tensor([0, ROWS * world - 1, 1, -100, 2])

    def run(x):
        return cross_entropy(hidden.cos(), x, targets, sizes=sizes, label_smoothing=0.1)

    def formula(xs):
        logits = hidden.cos() @ xs.flatten(0, 1).T
        return torch.nn.functional.cross_entropy(logits, targets, label_smoothing=0.1)

    return run, formula


CASES = {
    "supcon": supcon,
    "supcon with a margin": lambda *place: supcon(*place, margin=0.1),
    "sigmoid_supcon": sigmoid,
    "multiple_negatives": negatives,
    "maxsim": late_interaction,
    "cross_entropy": words,
    "cross_entropy with sizes": lambda *place: words(*place, sizes="equal"),
}


def small_chunks(patch):
    patch.setattr(relations, "TILE", (2, 3))
    patch.setattr(maxsim, "TILE", (2, 3))
    patch.setattr(vocabulary, "CHUNK_BYTES", 2 * ROWS * 8)


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("case", CASES)
def test_jacobians_hessians_and_batches_equal_the_formula(rank, world, case):
    """A rank's gradient is that of the sum of all ranks' losses; where the loss counts once, of one."""
    with pytest.MonkeyPatch.context() as patch:
        small_chunks(patch)
        run, formula = CASES[case](rank, world)
        factor = 1 if case.startswith("cross") else world
        xs = torch.stack(features((ROWS,) * world, 10, WIDTH))
        x = xs[rank]
        first, second = factor * grad(formula)(xs), factor * hessian(formula)(xs)
        along = grad(formula)(xs).sum(0)  # element j of every rank's input moves at once
        batch = torch.stack([xs, 2 * xs.cos()])
        by_batch = torch.stack([factor * grad(formula)(one)[rank] for one in batch])
        wanted = {
            jacrev: first[rank],
            jacfwd: along,
            hessian: second[rank].sum(2),
            lambda f: jacrev(jacrev(f)): second[:, :, :, rank].sum(0),
            lambda f: lambda _: vmap(f)(batch[:, rank]): torch.stack([*map(formula, batch)]),
            lambda f: lambda _: vmap(grad(f))(batch[:, rank]): by_batch,
        }
        for transform, want in wanted.items():
            torch.testing.assert_close(transform(run)(x).detach(), want, **TIGHT)


@pytest.mark.ranks(3)
def test_one_batch_of_ids_and_scales_too(rank, world):
    batch = [features((ROWS,) * world, seed, WIDTH) for seed in (10, 20)]
    ids = [ids_of((ROWS,) * world, seed, most=2) for seed in (1, 2)]
    scales = torch.tensor([2.0, 5.0], dtype=torch.float64)
    x, own_ids = (torch.stack([pieces[rank] for pieces in both]) for both in (batch, ids))
    got = vmap(grad(lambda x, y, s: supcon_loss(x, x.cos(), s, y, y)))(x, own_ids, scales)
    for one, pieces, all_ids, scale in zip(got, batch, map(torch.cat, ids), scales, strict=True):
        whole = torch.cat(pieces)
        formula = lambda x, y=all_ids, s=scale: reference.supcon(x, x.cos(), s, y, y)  # noqa: E731
        want = world * grad(formula)(whole).view(world, ROWS, WIDTH)[rank]
        torch.testing.assert_close(one.detach(), want, **TIGHT)


@pytest.mark.ranks(1, 3)
def test_a_batch_of_what_must_be_read_is_refused_on_every_rank(rank, world):
    x = torch.ones(2, 3, WIDTH)
    targets, masks = torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3, 1, dtype=torch.bool)
    tokens = x.unsqueeze(2)

    def masked(q, mask):
        return maxsim_loss(q, q, query_mask=mask)

    calls = {
        "cross_entropy": lambda: vmap(lambda x, y: cross_entropy(x, x, y))(x, targets),
        "maxsim_loss": lambda: vmap(masked)(tokens, masks),
    }
    for name, call in calls.items():
        raises_everywhere(ModeError, call, name, "torch.vmap maps over", "in a loop")


@pytest.mark.ranks(1, 2)
def test_gradients_inside_inference_mode(rank, world):
    x = random((3, WIDTH), rank)
    with torch.inference_mode():
        if not grad(lambda q: q.sin().sum())(x).any():
            pytest.skip("this torch gives zeros for its own functions")
    ids = torch.arange(3) % 2
    losses = (
        lambda q: supcon_loss(q, q.cos(), SCALE, ids, ids),
        lambda q: sigmoid_supcon_loss(q, q.cos(), SCALE, ids, ids),
        lambda q: multiple_negatives_loss(q, q.cos(), SCALE, margin=0.5),
        lambda q: maxsim_loss(q[:, None], q.cos()[:, None], SCALE),
        lambda q: cross_entropy(x, q, ids, sizes="equal"),
        lambda q: clip_loss(q, q.cos(), SCALE),
    )
    for loss in losses:
        want = grad(loss)(x)
        with torch.inference_mode():
            got = grad(loss)(x)
        torch.testing.assert_close(got.clone(), want, **TIGHT)
        assert want.abs().max() > 1e-3


@pytest.mark.ranks(2)
def test_a_batch_of_scales_inside_checked():
    """Their values cannot be read, and are not compared."""
    x, scales = torch.ones(2, 3, WIDTH), torch.ones(2)
    for loss in (multiple_negatives_loss, clip_loss):
        with ag.checked():
            got = vmap(lambda x, scale: loss(x, x, scale))(x, scales)  # noqa: B023
        torch.testing.assert_close(got, loss(x[0], x[0], 1.0).expand(2))
