"""Each kind of container is opened, mapped and rebuilt as what it was."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import threading
import uuid
from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch import Tensor
from torch.distributed.utils import _apply_to_tensors
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from allgrad.containers import flatten, map_tensors, register, split_tensors, tensors, unflatten
from allgrad.containers.kinds import nodes
from allgrad.errors import InputError


class Pair(NamedTuple):
    left: Any
    right: Any = 7


class Point(collections.namedtuple("Point", "x y")):  # noqa: PYI024
    __slots__ = ()


class Span(NamedTuple):
    start: Any
    end: Any


class SpanOfPair(Span):
    """Made of one argument, which is doubled."""

    name = "unset"

    def __new__(cls, pair: Any) -> Any:
        return super().__new__(cls, pair[0] * 2, pair[1])


class NamedDict(dict):
    name = "unset"


class NamedList(list):
    name = "unset"


class NamedTuple_(tuple):  # noqa: N801, SLOT001
    name = "unset"


class TensorSet(set):
    pass


@dataclasses.dataclass
class Batch:
    ids: Any
    mask: Any = None
    length: int = 0
    computed: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.computed = [self.ids]


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots:
    ids: Any
    note: str = "n"


@dataclasses.dataclass(frozen=True)
class FrozenManualSlots:
    __slots__ = ("ids",)
    ids: Any


@dataclasses.dataclass
class CountsInits:
    x: Any
    inits = 0

    def __post_init__(self) -> None:
        type(self).inits += 1


class Output(collections.OrderedDict):
    """A dict whose entries are attributes too, as model outputs are in popular libraries."""

    def __setitem__(self, key: str, value: object) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


def doubled(nest: Any) -> Any:
    return map_tensors(lambda tensor: tensor * 2, nest)


def a_tensor(*values: float) -> Tensor:
    return torch.tensor(values or (1.0, 2.0), dtype=torch.float64)


BUILD = {
    "dict": lambda t: {"b": t, "a": 3},
    "ordered dict": lambda t: collections.OrderedDict(b=t, a=3),
    "default dict": lambda t: collections.defaultdict(list, {"b": t, "a": 3}),
    "list": lambda t: [1, t, "s"],
    "tuple": lambda t: (None, t),
    "named tuple": Pair,
    "named tuple subclass": lambda t: Point(3, t),
    "named tuple with its own __new__": lambda t: SpanOfPair((3, t)),
    "deque": lambda t: collections.deque([t, 2], maxlen=5),
    "set": lambda t: {t},
    "frozen set": lambda t: frozenset({t}),
    "set subclass": lambda t: TensorSet({t}),
    "dict subclass": lambda t: NamedDict(b=t, a=3),
    "list subclass": lambda t: NamedList([t, 3]),
    "tuple subclass": lambda t: NamedTuple_((t, 3)),
    "user dict": lambda t: collections.UserDict(b=t, a=3),
    "user list": lambda t: collections.UserList([t, 3]),
    "dataclass": lambda t: Batch(t, mask=[t]),
    "frozen dataclass with slots": FrozenSlots,
    "frozen dataclass with its own slots": FrozenManualSlots,
    "packed sequence": lambda t: PackedSequence(t, torch.tensor([1, 1])),
    "struct sequence": lambda t: torch.return_types.max((t, 0)),
    "nested": lambda t: {"k": [Pair((t, FrozenSlots([t]))), NamedDict(z=collections.deque([t]))]},
}


@pytest.mark.parametrize("kind", BUILD)
def test_every_kind_is_mapped_and_keeps_its_type(kind: str) -> None:
    tensor = a_tensor()
    nest = BUILD[kind](tensor)
    result = doubled(nest)
    assert type(result) is type(nest)
    found = [node for node in nodes(result) if isinstance(node, Tensor)]
    assert len(found) == 1
    assert torch.equal(found[0], a_tensor(2.0, 4.0))
    assert torch.equal(tensor, a_tensor(1.0, 2.0))
    others = [node for node in nodes(nest) if isinstance(node, int | str)]
    assert others == [node for node in nodes(result) if isinstance(node, int | str)]


@pytest.mark.parametrize("kind", BUILD)
def test_every_kind_is_returned_itself_when_nothing_changed(kind: str) -> None:
    nest = BUILD[kind](a_tensor())
    assert map_tensors(lambda tensor: tensor, nest) is nest


@pytest.mark.parametrize("kind", BUILD)
def test_every_kind_goes_round_through_flatten(kind: str) -> None:
    tensor = a_tensor()
    leaves, structure = flatten(BUILD[kind](tensor))
    assert any(leaf is tensor for leaf in leaves)
    rebuilt = unflatten(structure, leaves)
    assert type(rebuilt) is type(BUILD[kind](tensor))
    again, same = flatten(rebuilt)
    assert same == structure
    assert all(new is old for new, old in zip(again, leaves, strict=True))
    assert structure == flatten(BUILD[kind](a_tensor(5.0)))[1]


@pytest.mark.parametrize(
    "kind",
    ["dict", "ordered dict", "list", "tuple", "named tuple", "set", "frozen dataclass with slots"],
)
def test_agrees_with_torch_where_torch_maps_the_kind(kind: str) -> None:
    nest = BUILD[kind](a_tensor())
    ours, theirs = doubled(nest), _apply_to_tensors(lambda tensor: tensor * 2, nest)
    assert type(ours) is type(theirs)
    torch.testing.assert_close(tensors(ours), tensors(theirs), rtol=0, atol=0)


def test_default_dict_keeps_its_factory_and_deque_its_length() -> None:
    assert doubled(collections.defaultdict(list, a=a_tensor())).default_factory is list
    assert doubled(collections.deque([a_tensor()], maxlen=5)).maxlen == 5


def test_named_tuple_keeps_its_fields() -> None:
    result = doubled(Pair(a_tensor(), right=Point(a_tensor(3.0), "s")))
    assert torch.equal(result.left, a_tensor(2.0, 4.0))
    assert torch.equal(result.right.x, a_tensor(6.0))
    assert result.right.y == "s"


@pytest.mark.parametrize(
    "nest",
    [
        *(NamedDict(b=a_tensor()), NamedList([a_tensor()]), NamedTuple_([a_tensor()])),
        SpanOfPair((3, a_tensor())),
    ],
)
def test_subclass_keeps_its_attributes(nest: Any) -> None:
    nest.name = "mine"
    leaves, structure = flatten(nest)
    for result in (doubled(nest), unflatten(structure, leaves)):
        assert result.name == "mine"
        assert result is not nest


def test_named_tuple_is_rebuilt_without_its_constructor() -> None:
    span = SpanOfPair((a_tensor(), 5))
    found, frame = split_tensors({"k": [span]})
    assert frame.names() == ["x['k'][0].start"]
    (rebuilt,) = frame([found[0] + 1])["k"]
    assert torch.equal(rebuilt.start, a_tensor(3.0, 5.0))
    assert rebuilt.end == 5
    assert torch.equal(doubled(span).start, a_tensor(4.0, 8.0))


def test_registered_named_tuple_is_rebuilt_as_registered() -> None:
    class Registered(SpanOfPair):
        pass

    register(Registered, lambda span: ((span.start,), span.end), lambda end, xs: (*xs, end))
    assert unflatten(*reversed(flatten(Registered((2, "s"))))) == (4, "s")


def test_dict_subclass_goes_by_sorted_keys_and_keeps_its_order() -> None:
    one, two = NamedDict(b=a_tensor(1.0), a=a_tensor(2.0)), NamedDict(a=1, b=2)
    leaves, structure = flatten(one)
    assert [leaf.item() for leaf in leaves] == [2.0, 1.0]
    assert structure == flatten(two)[1]
    assert structure != flatten(NamedDict(a=1, c=2))[1]
    assert list(doubled(one)) == ["b", "a"]


def test_dict_that_mirrors_its_entries_as_attributes_stays_consistent() -> None:
    output = Output(logits=a_tensor(), loss=a_tensor(3.0))
    output.note = "kept"
    result = doubled(output)
    assert result.logits is result["logits"]
    assert torch.equal(result.loss, a_tensor(6.0))
    assert result.note == "kept"
    assert torch.equal(output.loss, a_tensor(3.0))


def test_set_of_many_tensors_is_mapped() -> None:
    result = doubled({a_tensor(1.0), a_tensor(2.0), "s", (a_tensor(3.0), 4)})
    found = [node.item() for node in nodes(result) if isinstance(node, Tensor)]
    assert sorted(found) == [2.0, 4.0, 6.0]
    assert "s" in result
    assert len(result) == 4


@pytest.mark.parametrize("kind", [set, frozenset])
def test_set_of_many_tensors_has_no_order_to_flatten_in(kind: type) -> None:
    for nest in [kind({a_tensor(1.0), a_tensor(2.0)}), kind({a_tensor(), (1, a_tensor())})]:
        for taken_apart in [flatten, tensors, split_tensors]:
            with pytest.raises(
                InputError, match="A set has no order, and this one holds 2 tensors"
            ):
                taken_apart({"k": nest})


def test_set_around_one_tensor_has_one_order_whatever_else_it_holds() -> None:
    words = [uuid.uuid4().hex for _ in range(20)]
    leaves, _ = flatten({*words, 3, (1, a_tensor())})
    assert leaves[:-2] == [3, *sorted(words)]
    assert isinstance(leaves[-1], Tensor)


def test_dataclass_field_outside_init_is_mapped() -> None:
    batch = Batch(a_tensor())
    batch.computed = [a_tensor(5.0)]
    result = doubled(batch)
    assert torch.equal(result.computed[0], a_tensor(10.0))
    assert torch.equal(batch.computed[0], a_tensor(5.0))


def test_dataclass_field_not_yet_set_stays_unset() -> None:
    batch = Batch(a_tensor())
    del batch.computed
    assert not hasattr(doubled(batch), "computed")
    assert flatten(batch)[1] != flatten(Batch(a_tensor()))[1]


def test_dataclass_is_rebuilt_without_init() -> None:
    CountsInits.inits = 0
    counted = CountsInits(a_tensor())
    doubled(counted)
    unflatten(*reversed(flatten(counted)))
    assert CountsInits.inits == 1


def test_dataclass_with_an_init_only_argument_is_mapped() -> None:
    @dataclasses.dataclass
    class Scaled:
        x: Any
        scale: dataclasses.InitVar[int]

        def __post_init__(self, scale: int) -> None:
            self.x = self.x * scale

    assert torch.equal(doubled(Scaled(a_tensor(), 3)).x, a_tensor(6.0, 12.0))


def test_dataclass_keeps_other_attributes_and_drops_cached_ones() -> None:
    @dataclasses.dataclass
    class Cached:
        x: Any

        @functools.cached_property
        def total(self) -> Tensor:
            return self.x.sum()

    cached = Cached(a_tensor())
    cached.note = "kept"
    assert cached.total.item() == 3.0
    result = doubled(cached)
    assert result.note == "kept"
    assert result.total.item() == 6.0


def test_modules_enums_sizes_and_classes_are_leaves() -> None:
    @dataclasses.dataclass(eq=False)
    class Module(torch.nn.Module):
        x: Any

        def __new__(cls, *_: object) -> Any:
            self = super().__new__(cls)
            torch.nn.Module.__init__(self)
            return self

    class Shape(tuple, enum.Enum):  # noqa: SLOT001
        SQUARE = (1, 1)

    values = [Module(a_tensor()), Shape.SQUARE, torch.Size([2]), Batch, range(3)]
    assert all(a is b for a, b in zip(flatten(values)[0], values, strict=True))
    result = doubled([*values, a_tensor()])
    assert all(a is b for a, b in zip(result[:-1], values, strict=True))


def packed(*, enforce_sorted: bool) -> PackedSequence:
    padded = torch.arange(12, dtype=torch.float64).reshape(3, 4).requires_grad_()
    return pack_padded_sequence(
        padded,
        torch.tensor([4, 3, 1] if enforce_sorted else [1, 4, 2]),
        batch_first=True,
        enforce_sorted=enforce_sorted,
    )


@pytest.mark.parametrize("enforce_sorted", [True, False])
def test_packed_sequence_maps_its_data_and_keeps_its_layout(enforce_sorted: bool) -> None:
    sequence = packed(enforce_sorted=enforce_sorted)
    result = doubled({"s": sequence})["s"]
    assert torch.equal(result.data, sequence.data * 2)
    assert result.batch_sizes is sequence.batch_sizes
    assert (result.sorted_indices is None) == enforce_sorted
    assert result.sorted_indices is sequence.sorted_indices
    assert result.unsorted_indices is sequence.unsorted_indices
    ours, lengths = pad_packed_sequence(result, batch_first=True)
    theirs, expected_lengths = pad_packed_sequence(sequence, batch_first=True)
    assert torch.equal(ours, theirs * 2)
    assert torch.equal(lengths, expected_lengths)


def test_packed_sequence_passes_gradients_on() -> None:
    data = a_tensor(1.0, 2.0, 3.0).requires_grad_()
    result = doubled(PackedSequence(data, torch.tensor([2, 1])))
    weights = a_tensor(3.0, 5.0, 7.0)
    (result.data * weights).sum().backward()
    assert torch.equal(data.grad, 2 * weights)


def test_packed_indices_follow_the_data_to_its_device() -> None:
    moved = map_tensors(lambda tensor: tensor.to("meta"), packed(enforce_sorted=False))
    expected = packed(enforce_sorted=False).to("meta")
    for ours, theirs in zip(moved, expected, strict=True):
        assert (ours.device, ours.dtype, ours.shape) == (theirs.device, theirs.dtype, theirs.shape)
    assert moved.data.is_meta
    assert moved.sorted_indices.is_meta
    assert not moved.batch_sizes.is_meta


def test_packed_structures_are_equal_when_their_batch_sizes_are() -> None:
    data = a_tensor(1.0, 2.0, 3.0)
    one, same, other = (
        split_tensors(PackedSequence(data, torch.tensor(sizes)))[1]
        for sizes in ([2, 1], [2, 1], [1, 1, 1])
    )
    assert one == same
    assert hash(one) == hash(same)
    assert one != other


class Box:
    def __init__(self, content: Any, label: str = "") -> None:
        self.content, self.label = content, label


def test_registered_type_is_opened() -> None:
    class Mine(Box):
        pass

    assert flatten(Mine(1))[0] != [1]
    register(Mine, lambda box: ([box.content], box.label), lambda label, c: Mine(c[0], label))
    result = doubled([Mine(a_tensor(), "l")])[0]
    assert type(result) is Mine
    assert result.label == "l"
    assert torch.equal(result.content, a_tensor(2.0, 4.0))
    assert flatten(Mine(1, "l"))[1] == flatten(Mine(2, "l"))[1]
    assert flatten(Mine(1, "l"))[1] != flatten(Mine(1, "m"))[1]


def test_registering_a_type_met_before_takes_over() -> None:
    @dataclasses.dataclass
    class Met:
        x: Any
        hidden: Any

    assert len(tensors(Met(a_tensor(), a_tensor()))) == 2
    register(Met, lambda met: ([met.x], met.hidden), lambda hidden, c: Met(c[0], hidden))
    assert len(tensors(Met(a_tensor(), a_tensor()))) == 1


def test_registering_twice_or_a_non_type_is_refused() -> None:
    class Once(Box):
        pass

    register(Once, lambda box: ([box.content], None), lambda _, c: Once(c[0]))
    for bad in [Once, list, 3]:
        with pytest.raises(InputError, match="cannot be registered"):
            register(bad, lambda box: ([box.content], None), lambda _, c: Once(c[0]))


def test_type_registered_globally_with_optree_is_opened() -> None:
    class Everywhere(Box):
        pass

    optree.register_pytree_node(
        Everywhere,
        lambda box: ((box.content,), None),
        lambda _, children: Everywhere(*children),
        namespace=optree.registry.__GLOBAL_NAMESPACE,
    )
    assert torch.equal(doubled([Everywhere(a_tensor())])[0].content, a_tensor(2.0, 4.0))
    assert len(tensors(Everywhere(a_tensor()))) == 1


def test_other_namespaces_do_not_see_our_types() -> None:
    nest = {a_tensor()}
    assert len(tensors(nest)) == 1
    assert optree.tree_leaves(nest) == [nest]


def test_threads_may_meet_a_new_type_together() -> None:
    classes = [dataclasses.make_dataclass(f"New{i}", ["x"]) for i in range(30)]
    nest = [cls(a_tensor()) for cls in classes]
    found: list[int] = []
    start = threading.Barrier(4)

    def look() -> None:
        start.wait()
        found.append(len(tensors(nest)))

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [30] * 4


def test_nodes_lists_each_object_once_and_ends_on_cycles() -> None:
    tensor = a_tensor()
    loop: list[Any] = [tensor, {"t": tensor}]
    loop.append(loop)
    found = list(nodes(loop))
    assert len(found) == 3
    assert sum(node is tensor for node in found) == 1
