"""compare and verify: the same result on every rank, and one small message if all states are equal."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import allgrad as ag
from allgrad._wire import primitives as wire
from allgrad._wire.codec import DTYPES
from allgrad.errors import InputError, TensorError
from allgrad.module_state import StateMismatch, compare, free_storage, sync, verify
from allgrad.module_state._differences import differences
from allgrad.module_state._specs import EntrySpec


def found(state, **kwargs):
    """What compare finds, the same on every rank."""
    result = compare(state, **kwargs)
    text = repr(result).encode()
    gathered = ag.all_gather(torch.tensor(list(text), dtype=torch.uint8))
    assert bytes(gathered.tolist()) == text * dist.get_world_size()
    return {d.name: (d.what, d.odd) for d in result}


@pytest.mark.ranks(1, 3)
def test_equal_states_differ_in_nothing():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    assert compare(module) == []
    verify(module)


@pytest.mark.ranks(3)
def test_equal_states_cost_one_small_message():
    sent = []
    all_gather = wire.all_gather
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            wire, "all_gather", lambda g, x, c: sent.append(x.nbytes) or all_gather(g, x, c)
        )
        verify({"a": torch.arange(100_000)})
    assert sent == [56]


@pytest.mark.ranks(3)
def test_first_difference_is_named(rank):
    odd = rank == 1
    state = {
        "same": torch.ones(2),
        "value": torch.tensor([1.0, 2.0 + odd]),
        "shape": torch.ones(2 + odd),
        "dtype": torch.ones(2, dtype=torch.float64 if odd else torch.float32),
        "each": torch.tensor(rank),
        "none": torch.ones(0, 3),
    }
    state |= {"only": torch.ones(1)} if odd else {"most": torch.ones(1)}
    assert found(state) == {
        "dtype": ("dtype", (1,)),
        "each": ("value", (1, 2)),
        "most": ("name", (1,)),
        "only": ("name", (1,)),
        "shape": ("shape", (1,)),
        "value": ("value", (1,)),
    }
    assert set(found(state, ignore=["each", "value"])) == {"dtype", "most", "only", "shape"}


@pytest.mark.ranks(3)
def test_values_are_compared_bit_for_bit(rank):
    odd = rank == 2
    nan = torch.tensor([0x7FC00000 + odd], dtype=torch.int32).view(torch.float32)
    state = {
        "zero": torch.tensor(-0.0 if odd else 0.0),
        "nan": nan,
        "same nan": torch.tensor(torch.nan),
    }
    assert found(state) == {"zero": ("value", (2,)), "nan": ("value", (2,))}


@pytest.mark.ranks(3)
def test_strides_do_not_count(rank):
    x = torch.arange(6.0).view(2, 3)
    state = {
        "x": x.t().contiguous().t() if rank else x,
        "c": torch.view_as_complex(torch.ones(2, 2)),
    }
    state["c"] = state["c"].conj().resolve_conj() if rank else state["c"].conj()
    assert found(state) == {}


@pytest.mark.ranks(3)
def test_every_dtype_is_compared(rank):
    raw = torch.arange(16, dtype=torch.uint8) % 2
    state = {str(d): raw.roll(int(rank == 1)).view(d) for d in DTYPES}
    assert set(found(state)) == set(state)
    assert all(odd == (1,) for _, odd in found(state).values())


@pytest.mark.ranks(3)
def test_meta_and_lazy_tensors_have_no_value(rank):
    lazy = nn.LazyLinear(2)
    assert found(lazy) == {}
    assert found({"m": torch.empty(2, device="meta")}) == {}
    assert found({"m": torch.zeros(2, device="meta" if rank == 0 else "cpu")}) == {
        "m": ("value", (0,))
    }


@pytest.mark.ranks(3)
def test_kinds_ties_and_buffers_are_compared(rank):
    odd = rank == 0
    module = nn.Module()
    module.a = nn.Parameter(torch.ones(1))
    module.b = module.a if odd else nn.Parameter(torch.ones(1))
    module.register_buffer("hidden", torch.tensor(int(odd)), persistent=False)
    assert found(module) == {"b": ("tied", (0,)), "hidden": ("value", (0,))}


@pytest.mark.ranks(4)
def test_pieces_of_dtensors_are_compared(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "pieces"))
    state = {"w": distribute_tensor(torch.arange(8.0), mesh, [Replicate(), Shard(0)])}
    assert compare(state, group=(mesh, "copies")) == []
    assert found(state) == {"w": ("piece", (1, 3))}
    state["w"].to_local().add_(rank == 3)
    assert [d.what for d in compare(state, group=(mesh, "copies"))] == ["value"] * (rank % 2)


@pytest.mark.ranks(3)
def test_verify_shows_who_has_what(rank):
    state = {"w": torch.zeros(2, 8) + (rank == 2)}
    with pytest.raises(StateMismatch) as caught:
        verify(state)
    lines = str(caught.value).splitlines()
    assert lines[:2] == ["verify: every rank must hold the same state; 1 differs:", "w"]
    assert lines[2].startswith("  rank 0: (2, 8) float32 #")
    assert lines[2].endswith(lines[3][-12:])
    assert lines[4].endswith("   <- another value")
    assert lines[5].startswith("Call allgrad.module_state.sync")
    assert [d.name for d in caught.value.differences] == ["w"]
    assert ag.all_gather(torch.tensor([rank])).tolist() == [0, 1, 2]


@pytest.mark.ranks(3)
@pytest.mark.parametrize("other", [{"w": torch.ones(3)}, {"w": torch.ones(2).double()}, {}])
def test_verify_does_not_advise_a_sync_that_would_raise(rank, other):
    state = other if rank == 1 else {"w": torch.ones(2)}
    with pytest.raises(StateMismatch, match="Build the same state on every rank"):
        verify(state)
    with pytest.raises(StateMismatch, match="Build the same state on every rank"):
        sync(state)


@pytest.mark.ranks(3)
def test_many_differences_are_shortened(rank):
    with pytest.raises(StateMismatch, match=r"\.\.\. and 12 more") as caught:
        verify({f"x{i}": torch.tensor(rank) for i in range(20)})
    assert len(caught.value.differences) == 20


@pytest.mark.ranks(3)
def test_problem_of_one_rank_reaches_all(rank):
    state = {"a": torch.eye(2).to_sparse() if rank == 1 else torch.eye(2)}
    with pytest.raises(TensorError, match="rank 1: not ready   <- a is not dense"):
        compare(state)
    freed = torch.ones(2)
    if rank == 1:
        free_storage(freed)
    with pytest.raises(TensorError, match="rank 1: not ready   <- a is without memory"):
        compare({"a": freed})
    with pytest.raises(InputError, match="rank 0: not ready   <- ignore names nothing"):
        compare({"a": torch.ones(1)}, ignore=["b"] if rank == 0 else [])
    assert found({"a": torch.ones(1)}) == {}


def test_differences_cost_grows_linearly_with_ranks():
    rank_specs = [{"w": EntrySpec("tensor", value=str(rank))} for rank in range(20_000)]
    start = time.perf_counter()
    (difference,) = differences(rank_specs)
    assert len(difference.odd) == 19_999
    assert time.perf_counter() - start < 5  # minutes if each rank were compared with each
