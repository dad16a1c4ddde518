"""The container types of a nest: how each is flattened, and how it is rebuilt.

optree knows the built-in types. Other types (sets, dataclasses, ``PackedSequence``, subclasses of
the built-in types) are registered with optree when a nest first contains one, in a namespace of
our own, so that other users of optree see no change.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import functools
import threading
import warnings
from types import MemberDescriptorType
from typing import TYPE_CHECKING, Any

import optree
import torch
from optree.registry import register_pytree_node, unregister_pytree_node
from optree.utils import total_order_sorted
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn.utils.rnn import PackedSequence

from allgrad.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = [
    "NAMESPACE",
    "OpenNode",
    "named_tuples_to_register",
    "nodes",
    "open_node",
    "register",
    "register_all",
]

NAMESPACE = "allgrad"

_CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque)
_WRAPPERS = (collections.UserDict, collections.UserList)
# Subclasses of containers that are values nevertheless.
_VALUES = (Tensor, torch.nn.Module, enum.Enum, torch.Size)
_ATOMS = frozenset({Tensor, type(None), bool, int, float, complex, str, bytes})

_registering = threading.Lock()
_registered: set[type] = set()


@dataclasses.dataclass(slots=True)
class OpenNode:
    """A container flattened by one level: its children, and what is needed to rebuild it."""

    node: object
    children: list[Any]
    entries: Sequence[Any]
    metadata: Any
    handler: Any

    def close(self, children: list[Any]) -> Any:
        """A container like this one that holds ``children``; the same object if they are unchanged."""
        if all(new is old for new, old in zip(children, self.children, strict=True)):
            return self.node
        return self.handler.unflatten_func(self.metadata, children)

    def name(self, child: int, parent: str) -> str:
        """The Python expression for a child: ``x['a']``, ``x[0]``, ``x.field``."""
        kind = self.handler.path_entry_type
        entry = kind(self.entries[child], type(self.node), self.handler.kind)
        return str(entry.codify(parent))


def open_node(node: object) -> OpenNode | None:
    """Flatten a container by one level; None if ``node`` is a leaf."""
    cls = type(node)
    if cls in _ATOMS or isinstance(node, Tensor):
        return None
    handler = register_pytree_node.get(cls, namespace=NAMESPACE)
    unknown = handler is None or (
        handler.type is not cls and optree.is_namedtuple_class(cls) and _differs_when_called(cls)
    )
    if unknown and _register(cls):
        handler = register_pytree_node.get(cls, namespace=NAMESPACE)
    if handler is None:
        return None
    # Only flatten() needs an order; a set can be mapped without one.
    flatten = _open_set if isinstance(node, (set, frozenset)) else handler.flatten_func
    found, metadata, *rest = flatten(node)  # type: ignore[arg-type]
    children = list(found)
    entries = rest[0] if rest and rest[0] is not None else range(len(children))
    return OpenNode(node, children, tuple(entries), metadata, handler)


def nodes(nest: object) -> Iterator[object]:
    """Every distinct object of a nest once, containers and leaves, in no particular order."""
    seen: dict[int, object] = {}  # keeps the objects alive, so that ids stay unique
    waiting = [nest]
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen[id(node)] = node
        yield node
        opened = open_node(node)
        if opened is not None:
            waiting.extend(opened.children)


def register(
    cls: type,
    flatten: Callable[[Any], tuple[Iterable[Any], Any]],
    unflatten: Callable[[Any, Sequence[Any]], Any],
) -> None:
    """Register a container type of your own.

        flatten(obj)              -> (children, rest)     rest: everything else, compared by ==
        unflatten(rest, children) -> obj                  a new object, children in the same order

    Types registered in optree's global namespace need no registration here.
    """
    with _registering:
        if cls in _registered:  # registered automatically before; the explicit one wins
            unregister_pytree_node(cls, namespace=NAMESPACE)
            _registered.discard(cls)
        try:
            _add(cls, flatten, unflatten, optree.AutoEntry)
        except (TypeError, ValueError) as error:
            raise InputError(f"register: {cls!r} cannot be registered: {error}") from error


def register_all(leaf_types: set[type]) -> bool:
    """Register the container types among these types of leaves; tell whether there were any."""
    return sum(map(_register, leaf_types)) > 0


def named_tuples_to_register(structure: optree.PyTreeSpec) -> frozenset[type]:
    """The named tuples of a structure that optree, which calls their classes, would rebuild wrongly."""
    if is_dynamo_compiling():
        return frozenset()
    if structure.namespace:  # it holds on to objects of the caller
        return _named_tuples(structure)
    try:
        return _known_named_tuples(structure)
    except TypeError:  # a type of the caller's with parts that cannot be hashed
        return _named_tuples(structure)


def _named_tuples(structure: optree.PyTreeSpec) -> frozenset[type]:
    found: set[Any] = set()
    waiting = [structure]
    while waiting:
        node = waiting.pop()
        if node.kind == optree.PyTreeKind.NAMEDTUPLE:
            found.add(node.type)
        waiting += node.children()
    return frozenset(cls for cls in found if _differs_when_called(cls))


_known_named_tuples = functools.lru_cache(maxsize=256)(_named_tuples)


def _differs_when_called(cls: Any) -> bool:
    """Whether a subclass of a named tuple has a constructor or attributes of its own."""
    made = next((base for base in cls.__mro__ if tuple in base.__bases__), cls)
    own_constructor = cls.__new__ is not made.__new__ or cls.__init__ is not object.__init__
    return own_constructor or cls.__dictoffset__ != 0


def _register(cls: type) -> bool:
    """Register a type found in a nest. False: its objects are leaves."""
    if cls in _ATOMS or issubclass(cls, _VALUES):
        return False
    if not (issubclass(cls, (*_CONTAINERS, *_WRAPPERS)) or dataclasses.is_dataclass(cls)):
        return False
    with _registering:
        if cls in _registered:  # another thread has just done it
            return True
        if issubclass(cls, dict):
            _add(cls, _open_mapping, _close_mapping, optree.MappingEntry)
        elif issubclass(cls, (list, collections.deque)):
            _add(cls, lambda items: (items, _Kept(items)), _close_sequence, optree.SequenceEntry)
        elif issubclass(cls, tuple):
            entry = optree.NamedTupleEntry if hasattr(cls, "_fields") else optree.SequenceEntry
            _add(cls, lambda items: (items, _Kept(items)), _close_tuple, entry)
        elif issubclass(cls, (set, frozenset)):
            _add(cls, _open_set_in_order, _close_set, optree.FlattenedEntry)
        else:
            _add(cls, _open_attributes, _close_attributes, optree.GetAttrEntry)
        _registered.add(cls)
    return True


def _add(cls: type, opener: Any, closer: Any, entry: type[optree.PyTreeEntry]) -> None:
    with warnings.catch_warnings():  # optree warns when a named tuple is registered
        warnings.simplefilter("ignore", UserWarning)
        register_pytree_node(cls, opener, closer, path_entry_type=entry, namespace=NAMESPACE)


class _Kept:
    """The container that a rebuilt one is modelled on. Not part of the structure, so all are equal."""

    __slots__ = ("model",)

    def __init__(self, model: Any) -> None:
        self.model = model

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Kept)

    def __hash__(self) -> int:
        return hash(_Kept)

    def __repr__(self) -> str:
        return "..."


# Subclasses of the built-in containers are rebuilt as a copy of the model with new children. A class
# can define copy.copy for itself, and by default it does not run __init__.


def _open_mapping(items: dict[Any, Any]) -> tuple[list[Any], Any, tuple[Any, ...]]:
    ordered = isinstance(items, collections.OrderedDict)
    keys = tuple(items) if ordered else tuple(total_order_sorted(items))
    return [items[key] for key in keys], (keys, _Kept(items)), keys


def _close_mapping(metadata: tuple[tuple[Any, ...], _Kept], children: Iterable[Any]) -> Any:
    keys, kept = metadata
    new = copy.copy(kept.model)
    for key, child in zip(keys, children, strict=True):
        new[key] = child
    return new


def _close_sequence(kept: _Kept, children: Iterable[Any]) -> Any:
    new = copy.copy(kept.model)
    new.clear()
    new.extend(children)
    return new


def _close_tuple(kept: _Kept, children: Iterable[Any]) -> Any:
    new = tuple.__new__(type(kept.model), children)
    _set_attributes(new, _state(kept.model))
    return new


# Sets.


def _open_set(items: set[Any] | frozenset[Any]) -> tuple[list[Any], Any]:
    return list(items), type(items)


def _open_set_in_order(items: set[Any] | frozenset[Any]) -> tuple[list[Any], Any]:
    holders: list[Any] = []
    others: list[Any] = []
    for item in items:
        holds = any(isinstance(node, Tensor) for node in nodes(item))
        (holders if holds else others).append(item)
    if len(holders) > 1:
        raise InputError(
            f"A set has no order, and this one holds {len(holders)} tensors: "
            "their order would differ from rank to rank.\n"
            "Put them in a list, a tuple or a dict."
        )
    others.sort(key=lambda item: (type(item).__qualname__, repr(item)))
    return others + holders, type(items)


def _close_set(cls: type, children: Iterable[Any]) -> Any:
    return cls(children)


# Objects with attributes: dataclasses, and UserDict and UserList with their ``.data``.


def _open_attributes(holder: Any) -> tuple[list[Any], Any, tuple[str, ...]]:
    if isinstance(holder, _WRAPPERS):
        names: tuple[str, ...] = ("data",)
    else:  # a field with init=False may not have been set yet
        fields = dataclasses.fields(holder)
        names = tuple(field.name for field in fields if hasattr(holder, field.name))
    others = {name: value for name, value in _state(holder).items() if name not in names}
    return (
        [getattr(holder, name) for name in names],
        (type(holder), names, _Kept(others)),
        names,
    )


def _close_attributes(metadata: tuple[Any, tuple[str, ...], _Kept], children: Iterable[Any]) -> Any:
    cls, names, kept = metadata
    new = cls.__new__(cls)
    _set_attributes(new, kept.model)
    _set_attributes(new, dict(zip(names, children, strict=True)))
    return new


def _state(holder: Any) -> dict[str, Any]:
    """The attributes of an object, with or without slots, except cached properties."""
    cls = type(holder)
    slots = [name for base in cls.__mro__ for name in _slots(base) if hasattr(holder, name)]
    found = {name: getattr(holder, name) for name in slots} | getattr(holder, "__dict__", {})
    return {
        name: value
        for name, value in found.items()
        if not isinstance(getattr(cls, name, None), functools.cached_property)
    }


def _slots(cls: type) -> list[str]:
    """The slots a class itself defines, private names in their mangled form."""
    members = vars(cls).items() if "__slots__" in vars(cls) else ()
    return [name for name, member in members if isinstance(member, MemberDescriptorType)]


def _set_attributes(new: Any, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        object.__setattr__(new, name, value)  # frozen dataclasses too


# PackedSequence: its data is the tensor; the index tensors belong to the structure and are moved to
# the device of the data. batch_sizes stays on the CPU, where torch requires it.


class _Layout:
    __slots__ = ("batch_sizes", "sorted_indices", "unsorted_indices")

    def __init__(self, packed: PackedSequence) -> None:
        self.batch_sizes = packed.batch_sizes
        self.sorted_indices = packed.sorted_indices
        self.unsorted_indices = packed.unsorted_indices

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Layout) and torch.equal(self.batch_sizes, other.batch_sizes)

    def __hash__(self) -> int:
        return hash(tuple(self.batch_sizes.tolist()))

    def __repr__(self) -> str:
        return f"batch_sizes={self.batch_sizes.tolist()}"


def _open_packed(packed: PackedSequence) -> tuple[tuple[Tensor], _Layout, tuple[str]]:
    return (packed.data,), _Layout(packed), ("data",)


def _close_packed(layout: _Layout, children: Iterable[Any]) -> PackedSequence:
    (data,) = children

    def to_data_device(index: Tensor | None) -> Tensor | None:
        return index.to(data.device) if index is not None and isinstance(data, Tensor) else index

    return PackedSequence(
        data,
        layout.batch_sizes,
        to_data_device(layout.sorted_indices),
        to_data_device(layout.unsorted_indices),
    )


_add(PackedSequence, _open_packed, _close_packed, optree.GetAttrEntry)
