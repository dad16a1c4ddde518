"""Late interaction over the documents of all ranks against its formula in one process."""

from functools import partial

import pytest
import torch

from allgrad.errors import InputError, PieceMismatch, TensorError
from allgrad.losses import maxsim, maxsim_loss, reference
from allgrad.losses._rows import recompute
from exactness import leaf, place
from losses.kept_memory import largest_kept
from losses.samples import COUNTS, check_loss, features
from places import on
from refusals import raises_everywhere

SCALE = torch.tensor(2.0, dtype=torch.float64)


def lengths_of(counts, seed):
    drawn = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 5, (n,), generator=drawn).tolist() for n in counts]


def check(group, kind, symmetric=False, padded=True, reduction="mean"):
    rank, world = place(group)
    counts = COUNTS[kind][:world]
    lengths = [lengths_of(counts, seed) for seed in (1, 2)]
    pieces = [features([sum(n) for n in one], 10 + 10 * i) for i, one in enumerate(lengths)]

    def run(own, scalars):
        samples = [x.split(n[rank]) for x, n in zip(own, lengths, strict=True)]
        options = {"symmetric": symmetric, "grad_reduction": reduction, "group": group}
        if not padded and counts[rank]:
            return maxsim_loss(*samples, *scalars, **options)
        given = [pad(one, own[0]) for one in samples]
        options |= {
            f"{name}_mask": m for name, (_, m) in zip(("query", "document"), given, strict=True)
        }
        return maxsim_loss(*(x for x, _ in given), *scalars, **options)

    def whole(everyone, scalars):
        samples = [
            [s for x, n in zip(ranks, by_rank, strict=True) for s in x.split(n)]
            for ranks, by_rank in zip(everyone, lengths, strict=True)
        ]
        return reference.maxsim(*samples, *scalars, symmetric=symmetric)

    check_loss(group, run, whole, pieces, [SCALE], reduction)


def pad(samples, like):
    """Padding in front, which a mask must leave out wherever it is."""
    samples = [s for s in samples if len(s)]
    longest = max((len(s) for s in samples), default=0) + 1
    if not samples:
        return like.reshape(0, longest, like.shape[1]), torch.zeros(0, longest)
    rows = [
        torch.cat([7 * torch.ones_like(s[:1]).expand(longest - len(s), -1), s]) for s in samples
    ]
    mask = [[0] * (longest - len(s)) + [1] * len(s) for s in samples]
    return torch.stack(rows), torch.tensor(mask)


def check_all(group):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(maxsim, "TILE", (5, 7))
        for kind in COUNTS:
            check(group, kind)
        check(group, "ragged", symmetric=True, padded=False)
        check(group, "empty", symmetric=True, reduction="sum")
    check(group, "ragged")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("where", ["no world", "2 ranks", "3 ranks", "4 ranks"])
def test_equals_the_formula_with_two_derivatives(where):
    on(where, check_all)


def dense(query, document):
    """Padded samples of one length each."""
    return torch.einsum("bnd,csd->bcns", query, document).amax(3).sum(2)


def test_nested_and_padded_samples_of_one_length():
    q, d = (x[0].reshape(3, -1, 5) for x in (features((6,), 1), features((12,), 2)))
    targets = torch.arange(3)
    want = torch.nn.functional.cross_entropy(2.0 * dense(q, d), targets)
    torch.testing.assert_close(maxsim_loss(q, d, 2.0), want)
    nested = torch.nested.nested_tensor(list(d), layout=torch.jagged)
    torch.testing.assert_close(maxsim_loss(list(q), nested, 2.0), want)


def test_equals_colpali_engine():
    losses = pytest.importorskip("colpali_engine.loss")
    q, d = (x[0].reshape(3, -1, 5) for x in (features((6,), 1), features((12,), 2)))
    whole = losses.ColbertLoss(temperature=0.02, normalize_scores=False)
    torch.testing.assert_close(maxsim_loss(q, d, 50.0), whole(q, d))


def test_equals_pylate():
    pylate = pytest.importorskip("pylate.scores")
    q, d = (x[0].reshape(3, -1, 5) for x in (features((6,), 1), features((12,), 2)))
    want = torch.nn.functional.cross_entropy(pylate.colbert_scores(q, d), torch.arange(3))
    torch.testing.assert_close(maxsim_loss(q, d), want)


def test_tokens_that_tie_share_the_gradient():
    q = torch.ones(1, 1, 2, dtype=torch.float64)
    d = leaf(torch.ones(1, 2, 2, dtype=torch.float64))
    other = torch.zeros(1, 2, 2, dtype=torch.float64)
    maxsim_loss(torch.cat([q, q]), torch.cat([d, other])).backward()
    assert torch.equal(d.grad[0, 0], d.grad[0, 1])


def test_no_tensor_of_token_scores_is_kept():
    q, d = (leaf(x[0].reshape(40, -1, 5)) for x in (features((160,), 1), features((320,), 2)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(maxsim, "TILE", (64, 128))
        patch.setattr(recompute, "KEPT_SCORES", 160 * 320 - 1)
        for order in (1, 2):
            assert largest_kept(partial(maxsim_loss, q, d), (q, d), order) <= 320 * 5


@pytest.mark.ranks(3)
def test_bad_input_raises_on_every_rank(rank, world):
    q, d = torch.ones(2, 3, 4), torch.ones(2, 5, 4)
    short = torch.ones(2, 5)
    short[1] = 0
    wrong = {
        "document_mask has another shape": ((q, d), {"document_mask": short[:, :3]}, PieceMismatch),
        "a document has no token": ((q, d), {"document_mask": short}, InputError),
        "other values than 0 and 1": ((q, d), {"document_mask": (short - 1) * 1e9}, InputError),
        "2 queries and 1 documents": ((q, d[:1]), {}, PieceMismatch),
        "differ in width": ((q, d[:, :, :3]), {}, PieceMismatch),
        "empty list": ((q, []), {}, InputError),
        "of one width": ((q, [d[0], d[1, :, :2]]), {}, TensorError),
        "of 3 dimensions": ((q[0], d), {}, TensorError),
        "document is a list": ((q, list(d)), {"document_mask": short}, InputError),
        "other width": ((q[:, :, :3], d[:, :, :3]), {}, PieceMismatch),
        "other options": ((q, d), {"symmetric": True}, PieceMismatch),
    }
    for text, (given, options, error) in wrong.items():
        call = partial(maxsim_loss, *given, **options) if rank == 1 else partial(maxsim_loss, q, d)
        raises_everywhere(error, call, text, "rank 1: ", "<-")
    raises_everywhere(InputError, partial(maxsim_loss, q[:0], d[:0]), "no rank has a pair")
