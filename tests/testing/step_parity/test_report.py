"""``parity`` passes where ranks equal one process, and names ten planted mistakes where they do not.

Two towers, a contrastive loss over the rows of all ranks, a few more things in which a mistake can
be planted. Each mistake is one change of a step or a model that is right without it.
"""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel

import allgrad as ag
from allgrad.errors import InputError
from allgrad.losses import clip_loss, grad_cache_step
from allgrad.nn import convert
from allgrad.testing import Mistake, RankFailed
from allgrad.testing import parity as compare
from allgrad.wrappers import sum_gradients

ROWS = (3, 2, 4)


class Towers(nn.Module):
    def __init__(self, middle=nn.Tanh):
        super().__init__()
        self.one = nn.Sequential(nn.Linear(4, 5), middle(), nn.Linear(5, 3))
        self.two = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.tensor([2.0]))

    def forward(self, batch):
        one, two = normalize(self.one(batch["x"])), normalize(self.two(batch["y"]))
        return one, two, self.scale.sum()  # a scalar, but no view: FSDP warns of those


class Norms(Towers):
    def __init__(self):
        super().__init__(lambda: nn.BatchNorm1d(5))


class Drops(Towers):
    def __init__(self):
        super().__init__(lambda: nn.Dropout(0.5))


class Centred(nn.Module):
    """Outputs less a running centre of all rows, which follows them."""

    def __init__(self, total=ag.all_reduce, before=True):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.total, self.before = total, before
        self.register_buffer("centre", torch.zeros(3))

    def forward(self, batch):
        y = self.layer(batch["x"])
        centre = self.centre.clone()
        with torch.no_grad():
            mean = self.total(y.sum(0)) / self.total(torch.tensor(float(len(y))))
            self.centre.lerp_(mean, 0.5)
        return y - (centre if self.before else self.centre)


def batch(step, rank, ranks):
    rows = ROWS[rank]
    return {"x": torch.randn(rows, 4), "y": torch.randn(rows, 6)}


def even_batch(step, rank, ranks):
    return {"x": torch.randn(3, 4), "y": torch.randn(3, 6)}


def right(model, batch):
    """``clip_loss`` is the mean over all rows on every rank: averaged, it is that of one process."""
    return clip_loss(*model(batch))


def summed(model, batch):
    """A sum over rows, which is right where gradients are summed."""
    one, two, scale = model(batch)
    return (scale * (one * two).sum(1)).exp().sum()


def contrast(model, batch, gather=ag.all_gather, start=None):
    """The same by hand: each rank's rows against all rows; W times, as DDP averages."""
    one, two, scale = model(batch)
    if start is None:
        start = sum(ag.gather_sizes(one)[: dist.get_rank()])
    every = gather(two)
    scores = scale * one @ every.T
    labels = torch.arange(len(one)) + start
    total = sum(ag.gather_sizes(one))
    return cross_entropy(scores, labels, reduction="sum") / total * dist.get_world_size()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
@pytest.mark.parametrize("step", [right, contrast])
def test_towers_are_equal(parity, wrapper, step):
    report = parity(Towers, batch, step, ranks=3, wrapper=wrapper)
    assert report.equal
    assert report.largest < 1e-12
    assert "3 steps on 3 ranks under" in str(report)


def cached(model, batch):
    micro = [{name: x[rows] for name, x in batch.items()} for rows in (slice(2), slice(2, None))]
    return grad_cache_step(model, micro, clip_loss)


def test_grad_cache_step_is_equal(parity):
    assert parity(Towers, batch, cached, ranks=2, wrapper="ddp")


def averaged(model, batch):
    """Without a wrapper: the step takes the mean over ranks itself."""
    loss = right(model, batch)
    loss.backward()
    gradients = [p.grad for p in model.parameters()]
    for p, mean in zip(model.parameters(), ag.all_reduce(gradients, "mean"), strict=True):
        p.grad = mean
    return loss


def test_a_step_of_its_own_is_equal_as_it_is(parity):
    report = parity(lambda: convert(Norms()), batch, averaged, ranks=2, dtype=None)
    assert 1e-12 < report.largest < 1e-4  # float32


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_adam_makes_no_steps_of_rounding(parity, wrapper):
    """The bias in front of a batch norm has a gradient of zero, up to rounding."""

    def adam(parameters):
        return torch.optim.Adam(parameters, lr=1e-2)

    report = parity(
        lambda: convert(Norms()), batch, right, ranks=2, wrapper=wrapper, make_optimizer=adam
    )
    assert report.largest < 1e-12


# ---- planted mistakes -----------------------------------------------------------------------


def detached(x):
    """As many do it: torch's gather, and the own piece put back; equal sizes only."""
    pieces = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, x.detach())
    pieces[dist.get_rank()] = x
    return torch.cat(pieces)


def without_own(x):
    """The same without the own piece; in a world of one nothing is gathered, as is usual."""
    return x if dist.get_world_size() == 1 else ag.all_gather(x, grad="none")


def own_first(x):
    pieces = list(ag.all_gather(x).split(ag.gather_sizes(x)))
    own = pieces.pop(dist.get_rank())
    return torch.cat([own, *pieces])


def silent_on_rank_1(model, batch):
    loss = summed(model, batch)
    return loss.detach() if dist.get_rank() == 1 else loss


def zero_on_rank_1(model, batch):
    return (dist.get_rank() != 1) * dist.get_world_size() * summed(model, batch)


def regularised(model, batch, scale):
    norms = sum(p.square().sum() for p in model.parameters())
    return scale * (summed(model, batch) + 0.1 * norms)


def summing(model):
    return sum_gradients(DistributedDataParallel(model))


def accumulated(model, batch):
    losses = []
    for rows in (slice(1), slice(1, None)):
        losses.append(summed(model, {name: x[rows] for name, x in batch.items()}))
        losses[-1].backward()
    return sum(loss.detach() for loss in losses)


def centred(model, batch):
    return model(batch).square().sum() * dist.get_world_size()


def own_total(x):
    return x.clone()


def first_row_lost(model, batch):
    lost = 1 if dist.get_rank() == 1 else 0
    return contrast(model, {name: x[lost:] for name, x in batch.items()})


MISTAKES = {
    "missing factor": (Towers, batch, summed, "ddp", Mistake.FACTOR, "2 times too small: averaged by DDP"),
    "local batch norm": (Norms, batch, right, "ddp", Mistake.LOCAL_BATCH_NORM, "one.1: each rank normalises"),
    "detached gather": (Towers, even_batch, lambda m, b: contrast(m, b, detached), "ddp", Mistake.DETACHED, "with gradient"),
    "gather without any gradient": (Towers, batch, lambda m, b: contrast(m, b, without_own), "ddp", Mistake.DETACHED, "two.weight, two.bias have a gradient in one process"),
    "slice of other rows": (Towers, batch, lambda m, b: contrast(m, b, start=0), "ddp", Mistake.ORDER, "slice where the rank's rows start"),
    "slice of half the rows": (Towers, batch, lambda m, b: contrast(m, b, start=dist.get_rank()), "ddp", Mistake.SLICE, "rows are taken for other rows"),
    "slice without a row": (Towers, batch, first_row_lost, "ddp", Mistake.SLICE, r"rank 1 does not use rows \[0\]"),
    "unseeded dropout": (Drops, batch, right, "ddp", Mistake.RANDOM, r"dropout differs \(one.1\)"),
    "rank without gradient": (Towers, batch, silent_on_rank_1, "ddp", Mistake.RANK_WITHOUT_GRADIENT, "on rank 1 none"),
    "rank with a zero gradient": (Towers, batch, zero_on_rank_1, "ddp", Mistake.RANK_WITHOUT_GRADIENT, "the loss of rank 1"),
    "double-counted regulariser": (Towers, batch, lambda m, b: regularised(m, b, dist.get_world_size()), "ddp", Mistake.COUNTED_TWICE, "weight decay"),
    "wrong order of gather": (Towers, even_batch, lambda m, b: contrast(m, b, own_first), "ddp", Mistake.ORDER, "Join in rank order"),
    "stale buffer in the same step": (lambda: Centred(own_total, False), batch, centred, "ddp", Mistake.BUFFER, "already in this step"),
    "stale buffer": (lambda: Centred(own_total), batch, centred, "ddp", Mistake.BUFFER, "the ranks hold different values"),
    "accumulation without no_sync": (Towers, batch, accumulated, summing, Mistake.ACCUMULATION, "2 times in one step"),
    "nothing summed": (Towers, batch, summed, None, Mistake.NOT_SYNCHRONISED, "the sum of all ranks' parts"),
    "mean of own rows": (Towers, batch, lambda m, b: summed(m, b) / len(b["x"]), "ddp", Mistake.UNEQUAL_BATCHES, r"\[3, 2\]"),
}  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_named(name):
    model, make_batch, step, wrapper, mistake, words = MISTAKES[name]
    report = compare(model, make_batch, step, ranks=2, wrapper=wrapper, steps=2)
    assert not report.equal
    assert report.mistake is mistake, str(report)
    assert re.search(words, str(report)), str(report)


def test_rounding_is_told_from_a_mistake():
    report = compare(Towers, batch, right, ranks=2, wrapper="ddp", dtype=None, rtol=0.0)
    assert report.mistake is Mistake.ROUNDING
    report = compare(Towers, batch, summed, ranks=2, wrapper="ddp", dtype=None)
    assert report.mistake is Mistake.FACTOR


class Masked(Towers):
    """With a buffer of infinite entries, as a causal mask has."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))


class Forgetful(Masked):
    """Its buffer is NaN after the first step."""

    def forward(self, batch):
        self.mask.fill_(float("nan"))
        return super().forward(batch)


def scaled(model, batch, on_ranks, alone):
    return right(model, batch) * (on_ranks if len(batch["x"]) in ROWS else alone)


NAN, INF = float("nan"), float("inf")
NOT_FINITE = {
    "NaN": (Towers, lambda m, b: scaled(m, b, NAN, NAN), "on ranks 0, 1, and in one process too"),
    "infinite": (Towers, lambda m, _: m.module.scale.sum() * INF, "and in one process too"),
    "on ranks": (Towers, lambda m, b: scaled(m, b, NAN, 1), "in one process all are finite"),
    "in one process": (Towers, lambda m, b: scaled(m, b, 1, NAN), "on ranks all are finite"),
    "buffer": (Forgetful, right, "buffer mask has NaN .* and in one process too"),
}


@pytest.mark.parametrize("name", NOT_FINITE)
def test_values_that_are_not_finite_are_no_mistake_of_the_ranks(name):
    model, step, words = NOT_FINITE[name]
    report = compare(model, batch, step, ranks=2, wrapper=unused_too, steps=1, dtype=None)
    assert report.mistake is Mistake.NOT_FINITE, str(report)
    assert "cannot be compared with one process at step 0" in str(report)
    assert re.search(words, str(report)), str(report)


def unused_too(model):
    return DistributedDataParallel(model, find_unused_parameters=True)


def test_equal_infinite_entries_of_a_buffer_are_equal():
    assert compare(Masked, batch, right, ranks=2, wrapper="ddp", steps=2)


def test_summed_gradients_need_no_factor(parity):
    assert parity(Towers, batch, summed, ranks=2, wrapper=summing, steps=1)


def test_ddp_that_synchronises_more_than_once_is_equal_and_noted(parity):
    report = parity(Towers, even_batch, mean_accumulated, ranks=2, wrapper="ddp", steps=1)
    assert "DDP synchronises gradients 2 times in one step" in str(report)


def mean_accumulated(model, batch):
    for rows in (slice(1), slice(1, None)):
        part = {name: x[rows] for name, x in batch.items()}
        (summed(model, part) * dist.get_world_size()).backward()


def more_with_each_rank(step, rank, ranks):
    return [torch.zeros(1)] * (rank + 1)


def test_bad_arguments_are_named():
    with pytest.raises(InputError, match="at least 2 ranks"):
        compare(Towers, batch, right, ranks=1)
    with pytest.raises(InputError, match="there is no wrapper 'zero'"):
        compare(Towers, batch, right, wrapper="zero")
    with pytest.raises(RankFailed, match="differ in more than their rows"):
        compare(Towers, more_with_each_rank, right, ranks=2)
