"""Nests of tensors are taken apart, mapped and put back."""

from __future__ import annotations

import collections
import dataclasses
import gc
import weakref
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.utils import _apply_to_tensors

from allgrad.containers import Frame, flatten, map_tensors, split_tensors, tensors, unflatten
from allgrad.errors import InputError


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Link:
    value: Any
    next: Any = None


def a_tensor(*values: float) -> Tensor:
    return torch.tensor(values or (1.0, 2.0), dtype=torch.float64)


def nested_lists(levels: int, innermost: object) -> Any:
    nest = innermost
    for _ in range(levels):
        nest = [nest]
    return nest


def innermost(nest: Any) -> Any:
    while isinstance(nest, list):
        (nest,) = nest
    return nest


# Flattening.


def test_order_goes_by_sorted_keys_on_every_rank() -> None:
    x, y, z = a_tensor(1.0), a_tensor(2.0), a_tensor(3.0)
    one, two = {"b": x, "a": [y, 3, z]}, {"a": [y, 3, z], "b": x}
    for nest in (one, two):
        leaves, structure = flatten(nest)
        assert [id(leaf) for leaf in leaves] == [id(leaf) for leaf in (y, 3, z, x)]
        assert [id(tensor) for tensor in tensors(nest)] == [id(y), id(z), id(x)]
        assert list(unflatten(structure, leaves)) == list(nest)
    assert flatten(one)[1] == flatten(two)[1]


def test_structures_tell_containers_lengths_and_keys_apart() -> None:
    nests = [
        1, [1], (1,), [1, 2], {"a": 1}, {"b": 1}, [[1]], [], (), {}, Pair(1, 2), (1, 2), {1}, Link(1),
        collections.OrderedDict(a=1), collections.OrderedDict(a=1, b=2),
        collections.OrderedDict(b=2, a=1),
    ]  # fmt: skip
    structures = [flatten(nest)[1] for nest in nests]
    for i, one in enumerate(structures):
        assert [one == other for other in structures] == [i == j for j in range(len(nests))]
    assert structures == [flatten(nest)[1] for nest in nests]


def test_none_is_a_leaf() -> None:
    leaves, structure = flatten([None, {"k": None}])
    assert leaves == [None, None]
    assert unflatten(structure, [1, 2]) == [1, {"k": 2}]


@pytest.mark.parametrize("nest", [[], (), {}, set(), [[], {"k": ()}], None, 3, "text"])
def test_nest_without_tensors_comes_back(nest: object) -> None:
    found, frame = split_tensors(nest)
    assert found == []
    assert frame([]) == nest
    assert unflatten(*reversed(flatten(nest))) == nest
    assert map_tensors(torch.neg, nest) is nest


def test_unflatten_counts_the_leaves() -> None:
    _, structure = flatten([1, 2])
    for leaves in ([], [1], [1, 2, 3]):
        with pytest.raises(InputError, match=f"Leaves in this structure: 2; given: {len(leaves)}"):
            unflatten(structure, leaves)


# Frames.


def test_frame_replaces_the_tensors_and_keeps_the_rest() -> None:
    x, y = a_tensor(1.0), a_tensor(2.0)
    note = object()
    found, frame = split_tensors({"b": x, "a": Pair([y, 3], note), "c": None})
    assert [id(tensor) for tensor in found] == [id(y), id(x)]
    result = frame(["new y", "new x"])
    assert result == {"b": "new x", "a": Pair(["new y", 3], note), "c": None}
    assert list(result) == ["b", "a", "c"]
    assert frame(found)["b"] is x


def test_frame_of_a_tensor_is_the_tensor() -> None:
    x = a_tensor()
    found, frame = split_tensors(x)
    assert found[0] is x
    assert frame(found) is x
    assert frame.names() == ["x"]


def test_frame_may_be_filled_again_and_again() -> None:
    _, frame = split_tensors([Link(a_tensor()), 3])
    one, two = frame(["one"]), frame(["two"])
    assert (one, two) == ([Link("one"), 3], [Link("two"), 3])
    assert one[0] is not two[0]


def test_frame_lists_a_shared_tensor_at_each_place() -> None:
    x = a_tensor()
    found, frame = split_tensors([x, {"k": x}])
    assert [id(tensor) for tensor in found] == [id(x), id(x)]
    assert frame([1, 2]) == [1, {"k": 2}]


def test_frames_are_equal_when_tensors_stand_in_the_same_places() -> None:
    frame = split_tensors({"a": a_tensor(), "b": 3})[1]
    same = split_tensors({"b": "other", "a": a_tensor(5.0, 6.0, 7.0)})[1]
    assert frame == same
    assert hash(frame) == hash(same)
    for other in ({"a": 3, "b": a_tensor()}, {"a": a_tensor()}, [a_tensor(), 3]):
        assert frame != split_tensors(other)[1]
    assert frame != 3


def test_frame_counts_the_tensors() -> None:
    _, frame = split_tensors([a_tensor(), 1])
    for given_tensors in ([], [1, 2]):
        with pytest.raises(
            InputError,
            match=rf"Tensors in this nest: 1; given: {len(given_tensors)}.\n.*\[\*, \*\]",
        ):
            frame(given_tensors)


def test_frame_names_each_tensor_as_a_reader_would_reach_it() -> None:
    nest = {"b": Link(a_tensor()), "a": [0, a_tensor(), Pair(1, a_tensor())]}
    frame = split_tensors(nest)[1]
    assert frame.names() == ["x['a'][1]", "x['a'][2].right", "x['b'].value"]
    assert frame.names("batch")[0] == "batch['a'][1]"


def test_frame_tells_keys_alike_on_every_rank() -> None:
    def keys(nest: object) -> str:
        return split_tensors(nest)[1].keys()

    x = torch.ones(2)
    assert keys({"b": x, "a": [3, x]}) == keys({"a": [4, x], "b": x}) == "['a'][1], ['b']"
    assert keys({"a": x, "b": 3}) != keys({"a": 3, "b": x})
    assert keys({1: x}) == keys({1.0: x}) == keys({True: x}) == "[1]"
    assert keys({-1: x}) != keys({-2: x})
    assert keys({object(): x}) == keys({object(): x}) == "[object]"  # has an address in its repr
    assert keys(x) == ""


def test_frame_lets_the_tensors_go() -> None:
    nest = {"a": [a_tensor()], "b": Link(a_tensor())}
    watched = [weakref.ref(tensor) for tensor in tensors(nest)]
    frame = split_tensors(nest)[1]
    del nest
    gc.collect()
    assert isinstance(frame, Frame)
    assert [reference() for reference in watched] == [None, None]


# Mapping.


def test_map_calls_the_function_once_per_tensor_and_keeps_sharing() -> None:
    x, y = a_tensor(1.0), a_tensor(2.0)
    shared = [x, y]
    calls: list[int] = []

    def negated(tensor: Tensor) -> Tensor:
        calls.append(id(tensor))
        return -tensor

    result = map_tensors(negated, {"a": shared, "b": (x, shared), "c": Link(x)})
    assert sorted(calls) == sorted([id(x), id(y)])
    assert result["b"][0] is result["a"][0]
    assert result["c"].value is result["a"][0]
    assert result["b"][1] is result["a"]
    assert torch.equal(result["a"][0], a_tensor(-1.0))
    assert torch.equal(result["a"][1], a_tensor(-2.0))


def test_map_returns_the_containers_in_which_nothing_changed() -> None:
    kept, changed = a_tensor(1.0), a_tensor(2.0)
    nest = {"a": [kept, {"deep": (kept,)}], "b": [Link(changed), [3]], "c": {"k": [None]}}
    result = map_tensors(lambda tensor: -tensor if tensor is changed else tensor, nest)
    assert result["a"] is nest["a"]
    assert result["c"] is nest["c"]
    assert result["b"][1] is nest["b"][1]
    assert result is not nest
    assert result["b"] is not nest["b"]
    assert torch.equal(result["b"][0].value, a_tensor(-2.0))
    assert nest["b"][0].value is changed


def test_map_keeps_the_order_dicts_were_filled_in() -> None:
    nest = {"z": a_tensor(1.0), "a": {"y": 1, "b": a_tensor(2.0)}, 3: 4}
    result = map_tensors(torch.neg, nest)
    assert list(result) == ["z", "a", 3]
    assert list(result["a"]) == ["y", "b"]
    assert result["z"].item() == -1.0
    assert result["a"]["b"].item() == -2.0


def test_map_of_a_tensor_is_the_function() -> None:
    assert map_tensors(lambda tensor: tuple(tensor.shape), a_tensor()) == (2,)


def test_map_takes_results_of_any_type_as_torch_does() -> None:
    nest = {"a": [a_tensor(), 3], "b": Pair(a_tensor(1.0), None)}
    ours = map_tensors(lambda tensor: tensor.tolist(), nest)
    assert ours == _apply_to_tensors(lambda tensor: tensor.tolist(), nest)
    assert ours == {"a": [[1.0, 2.0], 3], "b": Pair([1.0], None)}


def test_map_does_not_look_into_results() -> None:
    x = a_tensor()
    result = map_tensors(lambda tensor: [tensor], [x, [x]])
    assert result[0] is result[1][0]
    assert result[0][0] is x


def test_map_passes_parameters_and_errors_on() -> None:
    parameter = torch.nn.Parameter(a_tensor())
    assert map_tensors(lambda tensor: tensor, [parameter])[0] is parameter

    def fails(tensor: Tensor) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        map_tensors(fails, [parameter])


def test_repeated_containers_cost_one_visit() -> None:
    x = a_tensor()
    nest: Any = [x]
    for _ in range(100):  # 2**100 places
        nest = [nest, nest]
    result = map_tensors(torch.neg, nest)
    assert result[0] is result[1]


def test_map_inside_compile_is_one_graph() -> None:
    def program(x: Tensor) -> Tensor:
        found, frame = split_tensors({"a": x, "b": [x * 2]})
        return frame([tensor + 1 for tensor in found])["b"][0] + map_tensors(torch.neg, [x])[0]

    x = a_tensor()
    compiled = torch.compile(program, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), x + 1, rtol=0, atol=0)


# Cycles and depth.


def list_cycle() -> Any:
    nest: list[Any] = [a_tensor(), 1]
    nest.append({"k": nest})
    return nest


def dict_cycle() -> Any:
    nest: dict[str, Any] = {"t": a_tensor()}
    nest["a"] = [nest]
    return nest


def dataclass_cycle() -> Any:
    link = Link(a_tensor())
    link.next = Link(a_tensor(), link)
    return [link]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (list_cycle, r"x\[2\]\['k'\] refers back to x:"),
        (dict_cycle, r"x\['a'\]\[0\] refers back to x:"),
        (dataclass_cycle, r"x\[0\].next.next refers back to x\[0\]:"),
    ],
)
def test_cycle_is_refused_and_named(build: Any, message: str) -> None:
    for taken_apart in (
        flatten,
        tensors,
        split_tensors,
        lambda nest: map_tensors(torch.neg, nest),
    ):
        with pytest.raises(InputError, match=message):
            taken_apart(build())


def test_long_cycle_has_a_short_message() -> None:
    loop: list[Any] = []
    loop.append(nested_lists(2000, loop))
    with pytest.raises(
        InputError, match=r"x\[0\]\[0\].* \.\.\. .*\[0\] refers back to x:"
    ) as caught:
        map_tensors(torch.neg, loop)
    assert len(str(caught.value)) < 500


def test_same_container_beside_itself_is_no_cycle() -> None:
    shared = [a_tensor()]
    assert len(tensors([shared, [shared], shared])) == 3


@pytest.mark.parametrize("levels", [500, 990])
def test_deep_nest_goes_round(levels: int) -> None:
    x = a_tensor()
    (found,), frame = split_tensors(nested_lists(levels, x))
    assert found is x
    assert innermost(frame([x])) is x
    assert frame == split_tensors(nested_lists(levels, x))[1]
    assert frame != split_tensors(nested_lists(levels - 1, x))[1]


def test_deep_dataclasses_go_round() -> None:
    nest: Any = None
    for _ in range(500):
        nest = Link(a_tensor(), nest)
    found, frame = split_tensors(nest)
    assert len(found) == 500
    assert frame(found).next.next.value is nest.next.next.value


def test_map_reaches_any_depth() -> None:
    result = map_tensors(torch.neg, nested_lists(20_000, a_tensor()))
    assert torch.equal(innermost(result), a_tensor(-1.0, -2.0))


def test_nest_too_deep_to_flatten_is_refused() -> None:
    for taken_apart in (flatten, tensors, split_tensors):
        with pytest.raises(InputError, match="too deep: more than 1000 containers"):
            taken_apart(nested_lists(5000, a_tensor()))


# Any nest.

LEAVES = st.one_of(
    st.builds(a_tensor, st.floats(allow_nan=False)), st.none(), st.integers(), st.text(max_size=3)
)
KEYS = st.one_of(st.text(max_size=2), st.integers(0, 5))


def containers_of(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(children, max_size=4)
    dicts = st.dictionaries(KEYS, children, max_size=4)
    return st.one_of(
        lists,
        lists.map(tuple),
        lists.map(collections.deque),
        dicts,
        dicts.map(collections.OrderedDict),
        dicts.map(lambda items: collections.defaultdict(int, items)),
        st.builds(Pair, children, children),
        st.builds(Link, children, children),
        st.frozensets(st.integers(), max_size=3),
    )


def same(one: Any, two: Any) -> bool:
    """Equal types, orders and values; tensors by identity. Knows nothing of the code under test."""
    if type(one) is not type(two):
        return False
    if isinstance(one, Tensor):
        return one is two
    if isinstance(one, dict):
        return list(one) == list(two) and all(same(one[key], two[key]) for key in one)
    if isinstance(one, Link):
        return same(one.value, two.value) and same(one.next, two.next)
    if isinstance(one, list | tuple | collections.deque):
        return len(one) == len(two) and all(map(same, one, two))
    return bool(one == two)


@settings(max_examples=200, deadline=None)
@given(st.recursive(LEAVES, containers_of, max_leaves=20))
def test_any_nest_goes_round(nest: Any) -> None:
    leaves, structure = flatten(nest)
    assert same(unflatten(structure, leaves), nest)
    found, frame = split_tensors(nest)
    assert same(frame(found), nest)
    assert [id(tensor) for tensor in found] == [
        id(leaf) for leaf in leaves if isinstance(leaf, Tensor)
    ]
    assert map_tensors(lambda tensor: tensor, nest) is nest
    there = {id(tensor): tensor.clone() for tensor in found}
    back = {id(there[id(tensor)]): tensor for tensor in found}
    moved = map_tensors(lambda tensor: there[id(tensor)], nest)
    assert flatten(moved)[1] == structure
    assert same(map_tensors(lambda tensor: back[id(tensor)], moved), nest)
    assert len(frame.names()) == len(set(frame.names())) == len(found)
