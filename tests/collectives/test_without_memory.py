"""Tensors of which nothing can be read raise, where Gloo would end the process."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.nn.parameter import UninitializedParameter
from torch.testing._internal.two_tensor import TwoTensor

import allgrad as ag
from allgrad.errors import TensorError


def freed():
    x = torch.ones(4)
    x.untyped_storage().resize_(0)
    return x


def freed_view():
    x = torch.ones(8)
    view = x[4:]
    x.untyped_storage().resize_(0)
    return view


def pending():
    return functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD)


TENSORS = {
    "freed": (freed, "memory of x was freed"),
    "a view of what was freed": (freed_view, "memory of x was freed"),
    "made of others": (lambda: TwoTensor(torch.ones(4), torch.ones(4)), "no memory of its own"),
    "pending": (pending, r"Give x\.wait\(\)"),
    "lazy": (UninitializedParameter, "has no shape yet"),
    "DTensor": (
        lambda: DTensor.from_local(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)]),
        "x is a DTensor",
    ),
}
CALLS = {
    "all_reduce": ag.all_reduce,
    "all_gather": ag.all_gather,
    "all_gather, equal": lambda x: ag.all_gather(x, sizes="equal"),
    "broadcast": ag.broadcast,
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", TENSORS)
def test_tensor_without_memory_raises(kind, call):
    make, message = TENSORS[kind]
    x = make()
    with pytest.raises(TensorError, match=message):
        CALLS[call](x)
    assert ag.all_reduce(torch.ones(1), grad="none").item() == 2


@pytest.mark.ranks(2)
def test_memory_that_was_freed_after_good_calls_raises():
    x = torch.ones(4)
    for _ in range(2):
        ag.all_reduce(x, grad="none")
    x.untyped_storage().resize_(0)
    with pytest.raises(TensorError, match="memory of x was freed"):
        ag.all_reduce(x, grad="none")
