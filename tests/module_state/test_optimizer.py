"""Optimizers: state tensors by the parameter's number, and the settings of groups."""

import enum

import numpy as np
import pytest
import torch
from torch import nn

from allgrad.module_state import StateMismatch, compare, sync, verify


class Kind(enum.StrEnum):
    A, B = "a", "b"


class Level(enum.IntEnum):
    LOW, MIDDLE, HIGH = range(3)


def trained(rank, make, steps=1, **settings):
    torch.manual_seed(7)
    module = nn.Linear(3, 2)
    optimizer = make(module.parameters(), lr=0.1 * (rank + 1), **settings)
    for _ in range(steps):
        optimizer.zero_grad()
        module(torch.full((1, 3), 1.0 + rank)).sum().backward()
        optimizer.step(lambda: module(torch.ones(1, 3)).sum())
    return module, optimizer


def plain(optimizer):
    return torch.utils._pytree.tree_map(
        lambda x: x.tolist() if isinstance(x, torch.Tensor) else x, optimizer.state_dict()
    )


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", ["AdamW", "SGD", "LBFGS", "ASGD"])
def test_state_and_settings_become_those_of_src(rank, name):
    extra = {"SGD": {"momentum": 0.9}}.get(name, {})
    _, optimizer = trained(rank, getattr(torch.optim, name), steps=1, **extra)
    _, wanted = trained(2, getattr(torch.optim, name), steps=1, **extra)
    sync(optimizer, 2)
    assert plain(optimizer) == plain(wanted)
    verify(optimizer)


@pytest.mark.ranks(3)
def test_containers_and_tensors_stay_the_same_objects(rank):
    module, optimizer = trained(rank, torch.optim.AdamW, betas=(0.5 + rank / 10, 0.9))
    state = optimizer.state[module.weight]
    average, group = state["exp_avg"], optimizer.param_groups[0]
    sync(optimizer, 1)
    assert optimizer.state[module.weight] is state
    assert state["exp_avg"] is average
    assert optimizer.param_groups[0] is group
    assert group["betas"] == (0.6, 0.9)
    assert group["lr"] == 0.2
    assert group["params"][0] is module.weight


@pytest.mark.ranks(3)
def test_differences_are_named_as_state_dict_is_indexed(rank):
    _, optimizer = trained(0, torch.optim.AdamW)
    if rank == 1:
        optimizer.param_groups[0]["lr"] = 0.3
        optimizer.param_groups[0]["betas"] = (0.9, 0.9)
        optimizer.state_dict()["state"][1]["exp_avg"].add_(1)
    found = {d.name: d.by_rank for d in compare(optimizer)}
    assert set(found) == {
        "param_groups[0]['betas'][1]",
        "param_groups[0]['lr']",
        "state[1]['exp_avg']",
    }
    assert found["param_groups[0]['lr']"] == ("0.1", "0.3", "0.1")
    assert [d.name for d in compare(optimizer, ignore=["param_groups[0]"])] == [
        "state[1]['exp_avg']"
    ]
    with pytest.raises(StateMismatch, match=r"rank 1: 0\.3   <- another value"):
        verify(optimizer)


@pytest.mark.ranks(3)
def test_none_numbers_and_strings_are_sent_exactly(rank):
    _, optimizer = trained(0, torch.optim.SGD)
    values = [None, True, 10**30, 0.1, float("inf"), "ä\udc80"]
    group = optimizer.param_groups[0]
    group["extra"] = values if rank == 0 else [rank] * len(values)
    sync(optimizer)
    assert group["extra"] == values
    assert [type(v) for v in group["extra"]] == [type(v) for v in values]


@pytest.mark.ranks(3)
def test_numpy_numbers_are_compared_and_sent_in_their_own_type(rank):
    _, optimizer = trained(0, torch.optim.SGD)
    group = optimizer.param_groups[0]
    group["lr"] = np.float32(0.1 * (rank + 1))
    group["extra"] = [np.float64(0.1 * rank), np.int64(2**62 - rank), np.bool_(rank == 1)]
    names = [f"param_groups[0]['extra'][{n}]" for n in range(3)] + ["param_groups[0]['lr']"]
    assert [(d.name, d.what) for d in compare(optimizer)] == [(name, "value") for name in names]
    sync(optimizer, 1)
    wanted = [np.float32(0.2), np.float64(0.1), np.int64(2**62 - 1), np.bool_(True)]
    found = [group["lr"], *group["extra"]]
    assert found == wanted
    assert [type(value) for value in found] == [type(value) for value in wanted]
    verify(optimizer)


@pytest.mark.ranks(3)
def test_a_number_that_cannot_hold_the_value_of_src_is_named(rank):
    _, optimizer = trained(0, torch.optim.SGD)
    optimizer.param_groups[0]["lr"] = np.float32(0.1) if rank == 1 else 0.1
    for call in (sync, verify):
        with pytest.raises(StateMismatch, match=r"rank 1: .*float32.*   <- another dtype"):
            call(optimizer)


@pytest.mark.ranks(3)
def test_numbers_of_python_and_numpy_with_the_same_range_are_the_same(rank):
    _, optimizer = trained(0, torch.optim.SGD)
    group = optimizer.param_groups[0]
    group["lr"] = 0.1 if rank == 1 else np.float64(0.1)
    verify(optimizer)
    sync(optimizer)
    assert type(group["lr"]) is np.float64
    assert group["lr"] == 0.1


@pytest.mark.ranks(3)
def test_objects_that_are_no_settings_stay_each_ranks_own(rank):
    _, optimizer = trained(rank, torch.optim.SGD)
    group = optimizer.param_groups[0]
    # Texts and numbers too, of a type that sync cannot make.
    others = Kind.A if rank else Kind.B, Level(rank)
    group["extra"] = [complex(rank), np.datetime64("2020-01-01") + rank, torch.float32, *others]
    own = list(group["extra"])
    sync(optimizer)
    assert group["lr"] == 0.1
    assert group["extra"] == own
    verify(optimizer)


@pytest.mark.ranks(3)
def test_ignored_settings_stay(rank):
    _, optimizer = trained(rank, torch.optim.SGD)
    sync(optimizer, 1, ignore=["param_groups[0]['lr']"])
    assert optimizer.param_groups[0]["lr"] == 0.1 * (rank + 1)


@pytest.mark.ranks(3)
def test_a_rank_that_has_not_stepped_is_named(rank):
    _, optimizer = trained(0, torch.optim.AdamW, steps=int(rank != 2))
    for call in (sync, verify):
        with pytest.raises(StateMismatch, match=r"rank 2: missing +<- missing here"):
            call(optimizer)


@pytest.mark.ranks(3)
def test_other_number_of_parameters_is_named(rank):
    module = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(list(module.parameters())[: 2 - (rank == 1)])
    with pytest.raises(StateMismatch, match="rank 1: object of length 1 list"):
        sync(optimizer)
