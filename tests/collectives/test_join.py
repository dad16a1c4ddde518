"""Ranks with unequal numbers of batches equal one process that has the joined rows of each step."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel

import allgrad as ag
from allgrad.errors import InputError, RankRaised
from exactness import random

ROWS = ([2, 1], [3], [1, 2, 2, 1])  # of the batches of each rank


def batches(rank):
    return [
        {"x": random((n, 4), 10 * rank + step), "weight": torch.tensor(0.5)}
        for step, n in enumerate(ROWS[rank])
    ]


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def loss_of(model, batch, sizes, rank):
    """Each row against all rows of all ranks."""
    z = normalize(model(batch["x"]))
    every = ag.all_gather(z, sizes=sizes) if len(sizes) > 1 else z
    labels = torch.arange(len(z)) + sum(sizes[:rank])
    return cross_entropy(5 * z @ every.T, labels, reduction="sum") / sum(sizes) * batch["weight"]


def alone():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
    for step in range(max(map(len, ROWS))):
        pieces = [batches(rank)[step]["x"] for rank in range(3) if step < len(ROWS[rank])]
        x = torch.cat(pieces)
        optimizer.zero_grad()
        loss_of(model, {"x": x, "weight": 0.5}, (len(x),), 0).backward()
        optimizer.step()
    return model


@pytest.mark.ranks(3)
@pytest.mark.parametrize("wrapped", [True, False])
def test_uneven_batches_equal_one_process(rank, world, wrapped):
    model = net()
    outer = DistributedDataParallel(model) if wrapped else model
    optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
    seen = []
    for batch, sizes in ag.join(batches(rank)):
        seen.append(sizes)
        optimizer.zero_grad()
        (loss_of(outer, batch, sizes, rank) * world).backward()
        if not wrapped:
            for p in model.parameters():
                p.grad = ag.all_reduce(p.grad, "mean")
        optimizer.step()
    assert seen == [(2, 3, 1), (1, 0, 2), (0, 0, 2), (0, 0, 1)]
    for a, b in zip(model.parameters(), alone().parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.ranks(3)
def test_one_ranks_trouble_raises_on_all(rank, world):
    def broken():
        yield torch.zeros(2, 1)
        raise OSError("no such file")

    with pytest.raises(
        OSError if rank == 1 else RankRaised,
        match="no such file" if rank == 1 else "rank 1: its iterable raised",
    ):
        list(ag.join(broken() if rank == 1 else [torch.zeros(1, 1)] * 3))
    with pytest.raises(InputError, match="rank 0: has no batch at all   <- nothing"):
        list(ag.join([torch.zeros(2, 1)] * rank))
    given = list(ag.join([torch.zeros(2, 1)] * rank, empty=torch.zeros(9, 1)))
    assert [sizes for _, sizes in given] == [(0, 2, 2), (0, 0, 2)]
    assert [tuple(batch.shape) for batch, _ in given] == [(2 * (step < rank), 1) for step in (0, 1)]
    with pytest.raises(InputError, match="rank 2: a batch without"):
        list(ag.join([(torch.tensor(1.0), "words")] if rank == 2 else [torch.zeros(2, 1)]))
    for before in ([], [torch.zeros(2, 1)]):  # None is no empty batch
        with pytest.raises(InputError, match="rank 1: a batch without"):
            list(ag.join([*before, None if rank == 1 else torch.zeros(2, 1)]))
    assert not list(ag.join([]))


PACKED = torch.nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
JAGGED = [torch.ones(2, 2), torch.ones(1, 2)]
WITHOUT_ROWS = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse rows": lambda: (torch.ones(3), torch.eye(3).to_sparse_csr()),
    "jagged": lambda: torch.nested.nested_tensor(JAGGED, layout=torch.jagged),
    "nested": lambda: torch.nested.nested_tensor(JAGGED),
    "packed": lambda: [torch.ones(3), PACKED],
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", WITHOUT_ROWS)
def test_tensors_that_cannot_be_without_rows_raise_on_all_at_the_first_step(rank, world, kind):
    make = WITHOUT_ROWS[kind]
    not_dense = "a batch with a tensor that is not dense +<- sparse, nested or packed"
    with pytest.raises(InputError, match=f"rank 0: {not_dense}\n  rank 1: {not_dense}"):
        list(ag.join([make() for _ in range(1 + rank)]))
    with pytest.raises(InputError, match=f"rank 0: 1 rows\n  rank 1: {not_dense}"):
        list(ag.join([make() if rank == 1 else torch.ones(1)]))
    with pytest.raises(InputError, match=f"rank 0: {not_dense}\n  rank 1: 1 rows"):
        list(ag.join([torch.ones(1)] * rank, empty=make() if rank == 0 else torch.ones(1)))
    assert ag.all_reduce(torch.ones(1)).item() == world


class Uncut(torch.Tensor):
    """A tensor that refuses to be indexed."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.__getitem__:
            raise RuntimeError("no rows can be taken")
        return super().__torch_function__(function, types, args, kwargs or {})


UNREADABLE = {
    "a set of two tensors": (lambda: {torch.ones(2), torch.zeros(2)}, "A set has no order"),
    "a tensor without slices": (lambda: Uncut(torch.ones(2)), "no rows can be taken"),
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", UNREADABLE)
def test_a_batch_without_an_empty_one_raises_on_all_at_its_step(rank, world, kind):
    make, why = UNREADABLE[kind]
    advice = why if rank == 1 else "The error of that rank tells why"
    table = r"rank 0: 2 rows\n  rank 1: a batch that cannot be read or emptied +<- raised"
    for later in (0, 1):
        before = [torch.ones(2)] * later
        with pytest.raises(InputError, match=f"{table}(\n.*)*{advice}"):
            list(ag.join([*before, make()] if rank == 1 else [torch.ones(2)] * 3))
    with pytest.raises(InputError, match=r"rank 1: a batch that cannot be read"):
        list(ag.join([torch.ones(2)], empty=make() if rank == 1 else None))
    assert ag.all_reduce(torch.ones(1)).item() == world


def test_a_world_of_one_refuses_what_every_world_does():
    with pytest.raises(InputError, match="rank 0: a batch with a tensor that is not dense"):
        list(ag.join([torch.eye(3).to_sparse()]))
    with pytest.raises(InputError, match="A set has no order"):
        list(ag.join([{torch.ones(2), torch.zeros(2)}]))


class NeverStarts:
    """A dataset whose workers cannot be started."""

    def __iter__(self):
        raise OSError("no such file")


@pytest.mark.ranks(3)
def test_an_iterable_that_cannot_be_started_raises_on_all(rank, world):
    for bad, kind, says in ((NeverStarts(), OSError, "no such"), (None, TypeError, "not iterable")):
        with pytest.raises(
            kind if rank == 1 else RankRaised,
            match=says if rank == 1 else "rank 1: its iterable raised",
        ):
            list(ag.join(bad if rank == 1 else [torch.zeros(1, 1)]))
    assert ag.all_reduce(torch.ones(1)).item() == world


def test_a_world_of_one_gives_its_batches():
    x = [torch.zeros(3, 1), torch.zeros(1, 1)]
    assert [(batch, sizes) for batch, sizes in ag.join(x)] == [(x[0], (3,)), (x[1], (1,))]
