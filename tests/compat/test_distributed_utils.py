"""The drop-in for torch.distributed.utils, beside the installed original wherever that is right."""

import inspect
from collections import OrderedDict, defaultdict, namedtuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives
from torch import nn
from torch.distributed import utils as original
from torch.nn.utils.rnn import pack_sequence

from allgrad.compat import distributed_utils as ours
from allgrad.errors import InputError, TensorError
from allgrad.module_state import StateMismatch

Pair = namedtuple("Pair", ["a", "b"])  # noqa: PYI024
CPU = torch.device("cpu")


FUNCTIONS = {
    name: function
    for name, function in vars(original).items()
    if inspect.isfunction(function) and function.__module__ == original.__name__
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signature_is_that_of_the_original(name):
    mine = inspect.signature(getattr(ours, name)).parameters.values()
    theirs = inspect.signature(FUNCTIONS[name]).parameters.values()
    assert [(p.name, p.default) for p in mine] == [(p.name, p.default) for p in theirs]


@pytest.mark.parametrize("call", [((), {}), ((1, 2), {}), ((), {"a": 3}), ((1,), {"b": 2, "a": 3})])
def test_calls_are_packed_and_unpacked_alike(call):
    args, kwargs = call
    packed = ours._pack_kwargs(*args, **kwargs)
    assert packed == original._pack_kwargs(*args, **kwargs)
    assert ours._unpack_kwargs(*packed) == original._unpack_kwargs(*packed) == (args, kwargs)


def test_too_many_keys_raise():
    with pytest.raises(InputError, match="2 keys"):
        ours._unpack_kwargs((1,), ("a", "b"))


def test_inputs_are_cast_alike():
    x, n = torch.ones(2, requires_grad=True), torch.tensor([1])
    for dtype in (torch.float64, torch.bfloat16, torch.complex64, None):
        mine = ours._cast_forward_inputs(dtype, x, [n, {"k": x}], flag=True, y=x)
        theirs = original._cast_forward_inputs(dtype, x, [n, {"k": x}], flag=True, y=x)
        assert mine[0][0].dtype == theirs[0][0].dtype == (dtype or torch.float32)
        assert mine[0][1][0] is n
        assert mine[0][1][1]["k"].dtype == theirs[0][1][1]["k"].dtype
        assert mine[1]["flag"] is True
        assert mine[1]["y"].dtype == theirs[1]["y"].dtype
        assert mine[0][0].requires_grad


@pytest.mark.parametrize(
    "inputs",
    [
        (torch.ones(2), 3),
        [torch.ones(2), [torch.zeros(1), "x"]],
        {"a": torch.ones(2), "b": {}},
        OrderedDict(a=torch.ones(2)),
        Pair(torch.ones(2), (1, torch.ones(1))),
        torch.ones(2),
        (),
        None,
    ],
    ids=str,
)
def test_inputs_are_moved_alike(inputs):
    meta = torch.device("meta")
    for target in (CPU, meta):
        mine = ours._recursive_to(inputs, target, False)
        theirs = original._recursive_to(inputs, target, False)
        assert type(mine) is type(theirs)
        assert str(mine) == str(theirs)


@pytest.mark.parametrize("args", [(), (torch.ones(1), 2)], ids=["no args", "args"])
@pytest.mark.parametrize("kwargs", [None, {}, {"k": torch.ones(1)}], ids=str)
def test_kwargs_are_moved_alike(args, kwargs):
    meta = torch.device("meta")
    mine, theirs = (
        ours._to_kwargs(args, kwargs, meta, False),
        original._to_kwargs(args, kwargs, meta, False),
    )
    assert str(mine) == str(theirs)


def test_tensors_are_mapped_and_results_kept():
    nest = {"a": [torch.ones(2), 3], "b": Pair(torch.ones(1), None)}
    double = lambda x: 2 * x  # noqa: E731
    assert str(ours._apply_to_tensors(double, nest)) == str(
        original._apply_to_tensors(double, nest)
    )
    packed = pack_sequence([torch.ones(2)])
    assert ours._apply_to_tensors(double, packed).data.tolist() == [2, 2]
    assert type(ours._apply_to_tensors(double, defaultdict(list, a=torch.ones(1)))) is defaultdict


def test_assertion_prints_and_raises(capsys):
    ours._p_assert(True, "fine")
    ours._p_assert(False, "said", raise_assertion_error=False)
    with pytest.raises(AssertionError, match="again"):
        ours._p_assert(0, "again")
    printed = capsys.readouterr()
    assert printed.out == "said\nagain\n"
    assert "test_assertion_prints_and_raises" in printed.err


def test_storage_is_freed_and_taken_as_by_the_original():
    for free, alloc in (
        (ours._free_storage, ours._alloc_storage),
        (original._free_storage, original._alloc_storage),
    ):
        t = torch.ones(3, 4)
        assert ours._data_ptr_allocated(t)
        assert original._data_ptr_allocated(t)
        free(t)
        free(t)
        assert not ours._data_ptr_allocated(t)
        assert not original._data_ptr_allocated(t)
        assert t.shape == (3, 4)
        alloc(t, t.shape)
        alloc(t, t.shape)
        assert t.untyped_storage().size() == 48
        t.fill_(2)
        assert t.sum() == 24


def test_storage_in_use_by_others_is_not_freed():
    whole = torch.ones(4)
    original._free_storage(whole.clone()[:2])  # a silent loss of the other half
    with pytest.raises(TensorError, match="only a part of its storage"):
        ours._free_storage(whole[:2])
    with pytest.raises(InputError, match="too few"):
        ours._alloc_storage(whole, torch.Size([2]))
    assert whole.tolist() == [1, 1, 1, 1]


def test_prefixes_are_replaced_alike():
    for old, new in (("layer.", "module.layer."), ("", "m."), ("a.", ""), ("zzz", "y")):
        mine = {"layer.w": 1, "a.w": 2, "layer2.w": 3}
        theirs = dict(mine)
        ours._replace_by_prefix(mine, old, new)
        original._replace_by_prefix(theirs, old, new)
        assert mine == theirs
    for replace in (ours._replace_by_prefix, original._replace_by_prefix):
        with pytest.raises(ValueError, match=r"distinct|different"):
            replace({}, "a", "a")


def test_root_modules_are_those_in_no_other():
    inner = nn.Linear(1, 1)
    middle = nn.Sequential(inner)
    other = nn.ReLU()
    for modules in ([inner, middle, other], [middle, inner], [inner, other], []):
        assert ours._get_root_modules(modules) == original._get_root_modules(modules)


def model(rank):
    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    with torch.no_grad():
        module[1].running_mean.fill_(rank)
    return module


@pytest.mark.ranks(3)
@pytest.mark.parametrize("buffers", [True, False])
def test_module_states_end_as_with_the_original(rank, buffers):
    mine, theirs = model(rank), model(rank)
    args = (dist.group.WORLD, 30, 1, {"0.bias"}, buffers)
    ours._sync_module_states(mine, *args)
    original._sync_module_states(theirs, *args)
    for name, value in theirs.state_dict().items():
        assert torch.equal(mine.state_dict()[name], value), name
    assert torch.equal(mine[0].weight, model(1)[0].weight)
    assert torch.equal(mine[0].bias, model(rank)[0].bias)


@pytest.mark.ranks(3)
def test_listed_tensors_end_as_with_the_original(rank):
    mine = [torch.full((2, 3), float(rank)).t(), torch.tensor(rank), torch.zeros(0)]
    ours._sync_params_and_buffers(dist.group.WORLD, mine, 1024, 2)
    assert [x.tolist() for x in mine] == [[[2.0] * 2] * 3, 2, []]
    assert mine[0].stride() == (1, 3)


@pytest.mark.ranks(3)
def test_shapes_are_verified_on_every_rank(rank):
    group = dist.group.WORLD
    ours._verify_param_shape_across_processes(group, [torch.zeros(2, 3), torch.full((1,), rank)])
    for odd in (torch.zeros(3, 2), torch.zeros(3, 2).t()):
        with pytest.raises(StateMismatch, match=r"params\[0\]") as caught:
            ours._verify_param_shape_across_processes(
                group, [odd if rank == 1 else torch.zeros(2, 3)]
            )
        assert isinstance(caught.value, RuntimeError)
        assert "rank 1: " in str(caught.value)
    ours._verify_param_shape_across_processes(group, [])
