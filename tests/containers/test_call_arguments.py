"""A call's arguments are packed, moved, cast and split as torch documents it, and its slips are not."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.utils import (
    _cast_forward_inputs,
    _pack_kwargs,
    _to_kwargs,
    _unpack_kwargs,
)
from torch.nn.utils.rnn import PackedSequence

from allgrad.containers.call_arguments import (
    cast_call,
    move_call,
    pack_call,
    scatter_call,
    unpack_call,
)
from allgrad.errors import InputError

CPU = torch.device("cpu")


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Batch:
    x: Any
    label: str = ""


def doubles(*values: float) -> Tensor:
    return torch.tensor(values or (1.0, 2.0), dtype=torch.float64)


# Packing.

CALLS = [
    ((), {}),
    ((1, 2), {}),
    ((), {"a": 3}),
    ((1, 2), {"a": 3, "b": 4}),
    ((1,), {"z": 1, "a": 2}),
]


@pytest.mark.parametrize(("args", "kwargs"), CALLS)
def test_pack_lays_keyword_values_last_as_torch_does(args: Any, kwargs: Any) -> None:
    keys, flat = pack_call(args, kwargs)
    assert (flat, keys) == _pack_kwargs(*args, **kwargs)
    assert unpack_call(keys, flat) == (args, kwargs) == _unpack_kwargs(flat, keys)


def test_pack_example() -> None:
    assert pack_call((1, 2), {"a": 3, "b": 4}) == (("a", "b"), (1, 2, 3, 4))
    assert pack_call((), {"b": 1, "a": 2}) == (("b", "a"), (1, 2))


@settings(deadline=None)
@given(st.lists(st.integers()).map(tuple), st.dictionaries(st.text(max_size=3), st.integers()))
def test_any_call_goes_round(args: Any, kwargs: Any) -> None:
    unpacked_args, unpacked_kwargs = unpack_call(*pack_call(args, kwargs))
    assert unpacked_args == args
    assert list(unpacked_kwargs.items()) == list(kwargs.items())


def test_unpack_takes_lists_and_gives_a_tuple() -> None:
    assert unpack_call(["a"], [1, 2]) == ((1,), {"a": 2})
    assert unpack_call([], [1, 2]) == ((1, 2), {})


def test_unpack_refuses_more_keys_than_values() -> None:
    with pytest.raises(InputError, match=r"2 keys need as many values; 1 were given.\n.*a, b"):
        unpack_call(("a", "b"), (1,))


def test_unpack_refuses_a_key_given_twice() -> None:
    with pytest.raises(InputError, match=r"appears twice.\n.*a, a"):
        unpack_call(("a", "a"), (1, 2))


# Moving.


def test_move_to_where_tensors_are_returns_them_as_torch_does() -> None:
    args = (doubles(), [doubles()], PackedSequence(doubles(), torch.tensor([1, 1])))
    kwargs = {"k": {"deep": doubles()}}
    moved = move_call(args, kwargs, "cpu")
    assert moved[0] is args
    assert moved[1] is kwargs
    (their_args,), (their_kwargs,) = _to_kwargs(args, kwargs, CPU, False)
    assert their_args[0] is moved[0][0]
    assert their_args[2] is moved[0][2]
    assert their_kwargs["k"]["deep"] is moved[1]["k"]["deep"]


def test_move_reaches_every_tensor_and_nothing_else() -> None:
    note = object()
    args = (Pair(doubles(), note), [3, (torch.tensor([1]),)])
    args_there, kwargs_there = move_call(args, {"b": Batch(doubles(), "l"), "n": None}, "meta")
    assert args_there[0].left.is_meta
    assert args_there[0].left.shape == (2,)
    assert args_there[0].right is note
    assert args_there[1][0] == 3
    assert args_there[1][1][0].is_meta
    assert kwargs_there["b"].x.is_meta
    assert kwargs_there["b"].label == "l"
    assert kwargs_there["n"] is None
    assert not args[0].left.is_meta


def test_move_keeps_a_tensor_given_twice_one_tensor() -> None:
    x = doubles()
    (moved,), kwargs = move_call((x,), {"again": [x]}, torch.device("meta"))
    assert kwargs["again"][0] is moved


def test_move_without_arguments_is_empty() -> None:
    assert move_call((), None, "cpu") == ((), {})
    assert move_call([], {}, "cpu") == ((), {})


# Casting.


def test_cast_changes_floating_tensors_only_as_torch_does() -> None:
    args = (doubles(0.1, 2.0), torch.tensor([1]), torch.tensor([True]), torch.tensor([1j]), 0.5)
    kwargs = {"nest": {"h": [torch.tensor([0.1], dtype=torch.float16)]}, "s": "text"}
    ours = cast_call(args, kwargs, torch.float32)
    theirs = _cast_forward_inputs(torch.float32, *args, **kwargs)
    assert [type(a) for a in ours[0]] == [type(a) for a in theirs[0]]
    for mine, other in zip(ours[0][:4], theirs[0][:4], strict=True):
        assert mine.dtype == other.dtype
        assert torch.equal(mine, other)
    assert [a.dtype for a in ours[0][:4]] == [
        torch.float32,
        torch.int64,
        torch.bool,
        torch.complex64,
    ]
    assert all(mine is given_ for mine, given_ in zip(ours[0][1:], args[1:], strict=True))
    assert ours[1]["nest"]["h"][0].dtype == torch.float32
    assert torch.equal(ours[1]["nest"]["h"][0], theirs[1]["nest"]["h"][0])
    assert ours[1]["s"] == "text"


def test_cast_to_what_tensors_are_returns_them() -> None:
    args, kwargs = (doubles(), [torch.tensor([1])]), {"k": {"x": doubles()}}
    for dtype in (torch.float64, None):
        same_args, same_kwargs = cast_call(args, kwargs, dtype)
        assert same_args is args
        assert same_kwargs is kwargs


@pytest.mark.parametrize("requires_grad", [True, False])
def test_cast_keeps_requires_grad(requires_grad: bool) -> None:
    x = doubles().requires_grad_(requires_grad)
    (mine,), _ = cast_call((x,), None, torch.float32)
    (other,), _ = _cast_forward_inputs(torch.float32, x)
    assert mine.requires_grad == other.requires_grad == requires_grad


def test_gradient_comes_back_in_the_dtype_of_the_original() -> None:
    x = torch.tensor([0.5, -1.5, 4.0], dtype=torch.float32, requires_grad=True)
    (wide,), kwargs = cast_call((x,), {"again": Batch(x)}, torch.float64)
    assert kwargs["again"].x is wide
    weights = doubles(3.0, 5.0, 7.0)
    (weights * wide**2 + kwargs["again"].x).sum().backward()
    assert x.grad.dtype == torch.float32
    assert torch.equal(x.grad.double(), 2 * weights * x.detach().double() + 1)


def test_gradient_through_a_widening_cast_is_exact_to_second_order() -> None:
    x = doubles(0.5, -1.5, 4.0).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: cast_call((t,), {}, torch.float64)[0][0] ** 3, x)
    assert torch.autograd.gradgradcheck(lambda t: cast_call((t,), {}, torch.float64)[0][0] ** 3, x)


def test_cast_reaches_a_packed_sequence() -> None:
    data = doubles(1.0, 2.0, 3.0).requires_grad_()
    packed = PackedSequence(data, torch.tensor([2, 1]), torch.tensor([1, 0]))
    ((half,), _) = cast_call((packed,), {}, torch.float32)
    assert half.data.dtype == torch.float32
    assert half.batch_sizes is packed.batch_sizes
    assert half.sorted_indices is packed.sorted_indices
    half.data.sum().backward()
    assert torch.equal(data.grad, doubles(1.0, 1.0, 1.0))


def test_cast_to_complex_has_a_real_gradient() -> None:
    x = doubles(1.0, -2.0).requires_grad_()
    ((y,), _) = cast_call((x,), {}, torch.complex128)
    assert y.tolist() == [1, -2]
    ((y * torch.tensor([1 + 2j, 3 - 1j])).real.sum()).backward()
    assert x.grad is not None
    assert torch.equal(x.grad, doubles(1.0, 3.0))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_cast_to_what_has_no_gradient_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(InputError, match=f"floating-point or complex dtype, not {dtype}"):
        cast_call((doubles(),), {}, dtype)


# Splitting over devices.


def chunks(parts: int) -> Any:
    return lambda tensor: list(tensor.chunk(parts))


def test_scatter_gives_each_device_its_part_and_repeats_the_rest() -> None:
    note = object()
    x, m = doubles(1.0, 2.0, 3.0), doubles(4.0, 5.0, 6.0)
    args, kwargs = scatter_call(
        (x, note, 3), {"mask": {"m": [m], "t": Pair(x, 1)}}, chunks(3), parts=3
    )
    assert len(args) == len(kwargs) == 3
    for part in range(3):
        assert torch.equal(args[part][0], x[part : part + 1])
        assert args[part][1] is note
        assert args[part][2] == 3
        assert torch.equal(kwargs[part]["mask"]["m"][0], m[part : part + 1])
        assert kwargs[part]["mask"]["t"].left is args[part][0]
        assert kwargs[part]["mask"]["t"].right == 1


def test_scatter_runs_once_for_a_tensor_given_twice() -> None:
    x = doubles()
    calls: list[Tensor] = []

    def scatter(tensor: Tensor) -> Any:
        calls.append(tensor)
        return tensor.chunk(2)

    scatter_call((x, [x]), {"again": x}, scatter, parts=2)
    assert len(calls) == 1


def test_scatter_fills_the_missing_side() -> None:
    x = doubles()
    args, kwargs = scatter_call((x,), None, chunks(2), parts=2)
    assert [a[0].item() for a in args] == [1.0, 2.0]
    assert kwargs == ({}, {})
    assert kwargs[0] is not kwargs[1]
    args, kwargs = scatter_call((), {"x": x}, chunks(2), parts=2)
    assert args == ((), ())
    assert [k["x"].item() for k in kwargs] == [1.0, 2.0]


def test_scatter_of_a_short_batch_uses_fewer_devices() -> None:
    args, kwargs = scatter_call((doubles(1.0, 2.0), 3), {"k": 4}, chunks(5), parts=5)
    assert [(a[0].item(), a[1]) for a in args] == [(1.0, 3), (2.0, 3)]
    assert kwargs == ({"k": 4}, {"k": 4})


def test_scatter_without_tensors_repeats_the_call() -> None:
    assert scatter_call((1, "s"), {"k": None}, chunks(3), parts=3) == (
        ((1, "s"),) * 3,
        ({"k": None},) * 3,
    )
    assert scatter_call((), {}, chunks(2), parts=2) == (((), ()), ({}, {}))


def test_scatter_refuses_to_lose_a_part() -> None:
    with pytest.raises(InputError, match="same number of parts, not 3, 2"):
        scatter_call((doubles(1.0, 2.0, 3.0), doubles()), {}, chunks(3), parts=3)


def test_scatter_refuses_too_many_parts_none_and_no_devices() -> None:
    with pytest.raises(InputError, match="3 parts for 2 devices"):
        scatter_call((doubles(1.0, 2.0, 3.0),), {}, chunks(3), parts=2)
    with pytest.raises(InputError, match="0 parts for 2 devices"):
        scatter_call((doubles(),), {}, lambda _: [], parts=2)
    with pytest.raises(InputError, match="at least 1, not 0"):
        scatter_call((doubles(),), {}, chunks(3), parts=0)


def test_scatter_refuses_a_packed_sequence() -> None:
    packed = PackedSequence(doubles(), torch.tensor([1, 1]))
    with pytest.raises(InputError, match="PackedSequence cannot be split"):
        scatter_call((), {"p": [packed]}, chunks(2), parts=2)


def test_gradient_of_the_parts_comes_back_joined() -> None:
    x = doubles(1.0, 2.0, 3.0).requires_grad_()
    args, _ = scatter_call(([x],), {}, chunks(3), parts=3)
    weights = (3.0, 5.0, 7.0)
    sum(weight * a[0][0] for weight, a in zip(weights, args, strict=True)).sum().backward()
    assert torch.equal(x.grad, doubles(*weights))
