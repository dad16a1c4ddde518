"""A mistake that one rank alone can see: in checked mode and under a deadline every rank raises."""

import pytest
import torch
import torch.distributed as dist

import allgrad as ag
from allgrad.errors import InputError, RankLate, RankLost, RankRaised
from allgrad.nn import (
    ColumnParallelLinear,
    HaloConv1d,
    RowParallelLinear,
    SyncBatchNorm,
    VocabParallelEmbedding,
    combine,
    dispatch,
    gathered_attention,
    halo_exchange,
    minibatch_stddev,
    ring_attention,
)
from allgrad.testing import run_ranks

ODD = 1


def tokens(shape):
    return torch.zeros(shape)


def wrong_weights(odd, rank):
    sent = dispatch(tokens((2, 3)), torch.tensor([0, 2]), experts=3)
    return combine(sent.tokens, sent, torch.ones(2 + odd))


def wrong_rows(odd):
    sent = dispatch(tokens((2, 3)), torch.tensor([0, 2]), experts=3)
    return combine(None if odd else sent.tokens, sent)


def attention(call):
    def attend(odd, rank):
        q, kv = tokens((4, 2, 3)), tokens((3 if odd else 2, 2, 3))
        return call(q, kv, kv, sizes=[2, 2, 2])

    return attend


MISTAKES = {
    "SyncBatchNorm": lambda odd, _: SyncBatchNorm(4)(tokens((2, 4 + odd))),
    "minibatch_stddev": lambda odd, _: minibatch_stddev(tokens((2, 4 + odd)), channels=2),
    "combine": wrong_weights,
    "ColumnParallelLinear": lambda odd, _: ColumnParallelLinear(4, 6, gather_output=True)(
        tokens((2, 4 + odd))
    ),
    "RowParallelLinear": lambda odd, _: RowParallelLinear(6, 4)(tokens((2, 2 + odd))),
    "RowParallelLinear: x is (2, 2) torch.float64": lambda odd, _: RowParallelLinear(6, 4)(
        tokens((2, 2)).double() if odd else tokens((2, 2))
    ),
    "ColumnParallelLinear: x is (2, 4) torch.int64": lambda odd, _: ColumnParallelLinear(
        4, 6, gather_output=True
    )(tokens((2, 4)).long() if odd else tokens((2, 4))),
    "VocabParallelEmbedding": lambda odd, _: VocabParallelEmbedding(6, 2)(torch.tensor([5 + odd])),
    "ring_attention": attention(ring_attention),
    "gathered_attention": attention(gathered_attention),
    "halo_exchange": lambda odd, _: halo_exchange(tokens((1, 3 + odd)), -1, 1, 0, sizes=[3, 3, 3]),
    "HaloConv1d": lambda odd, _: HaloConv1d(1, 1, 3, padding=1)(
        tokens((1, 1, 3 + odd)), sizes=[3, 3, 3]
    ),
    "SyncBatchNorm: x is NoneType": lambda odd, _: SyncBatchNorm(4)(
        None if odd else tokens((2, 4))
    ),
    "ring_attention: k is NoneType": lambda odd, _: ring_attention(
        tokens((2, 2, 3)), None if odd else tokens((2, 2, 3)), tokens((2, 2, 3))
    ),
    "dispatch: x is NoneType": lambda odd, _: dispatch(
        None if odd else tokens((2, 3)), torch.tensor([0, 2]), experts=3
    ),
    "combine: y is NoneType": lambda odd, _: wrong_rows(odd),
    "minibatch_stddev: x is list": lambda odd, _: minibatch_stddev(
        [1.0] if odd else tokens((2, 4))
    ),
    "halo_exchange: x is list": lambda odd, _: halo_exchange(
        [1.0] if odd else tokens((1, 3)), -1, 1, 0
    ),
    "HaloConv1d: x is list": lambda odd, _: HaloConv1d(1, 1, 3, padding=1)(
        [1.0] if odd else tokens((1, 1, 3))
    ),
    "VocabParallelEmbedding: ids is list": lambda odd, _: VocabParallelEmbedding(6, 2)(
        [5] if odd else torch.tensor([5])
    ),
    "RowParallelLinear: x is list": lambda odd, _: RowParallelLinear(6, 4)(
        [1.0] if odd else tokens((2, 2))
    ),
    "dispatch: experts=1.5": lambda odd, _: dispatch(
        tokens((2, 3)), torch.tensor([0, 2]), experts=1.5 if odd else 3
    ),
    "dispatch: capacity=1.5": lambda odd, _: dispatch(
        tokens((2, 3)), torch.tensor([0, 2]), experts=3, capacity=1.5 if odd else 2
    ),
    "dispatch: capacity=-1": lambda odd, _: dispatch(
        tokens((2, 3)), torch.tensor([0, 2]), experts=3, capacity=-1 if odd else 2
    ),
}


@pytest.mark.ranks(3)
def test_every_rank_raises_in_checked_mode(rank, world):
    for name, call in MISTAKES.items():
        error = InputError if rank == ODD else RankRaised
        with ag.checked(), pytest.raises(error) as caught:
            call(int(rank == ODD), rank)
        assert name in str(caught.value), name
        assert rank == ODD or f"rank {ODD}" in str(caught.value), name
        assert ag.all_reduce(torch.ones(())).item() == world, name


def make_mistake(name):
    """Outside checked mode the others wait for the rank that raised, as long as they are told to."""
    rank = dist.get_rank()
    ag.all_reduce(torch.ones(()))  # all of them are there
    error = InputError if rank == ODD else (RankLate, RankLost)
    with pytest.raises(error) as caught, ag.deadline(2):
        MISTAKES[name](int(rank == ODD), rank)
    assert name in str(caught.value) if rank == ODD else f"rank {ODD}" in str(caught.value)
    dist.destroy_process_group()


@pytest.mark.one_in(7)
@pytest.mark.parametrize("name", MISTAKES)
def test_every_rank_raises_under_a_deadline(name):
    run_ranks(make_mistake, 3, name)


@pytest.mark.ranks(3)
def test_without_a_mistake_nobody_raises(rank, world):
    with ag.checked():
        for call in MISTAKES.values():
            call(0, rank)
