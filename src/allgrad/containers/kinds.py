"""The kinds of container a nest may be made of: how each is opened, and how it is put back.

optree knows the built-in ones. The others (sets, dataclasses, ``PackedSequence``, subclasses of the
built-in ones) join optree's registry in a namespace of ours when a nest first shows one, so nobody
else's trees change.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import functools
import threading
import warnings
from typing import TYPE_CHECKING, Any

import optree
import torch
from optree.registry import register_pytree_node, unregister_pytree_node
from optree.utils import total_order_sorted
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from allgrad.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = ["NAMESPACE", "OpenNode", "learn_all", "nodes", "open_node", "register"]

NAMESPACE = "allgrad"

_CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque)
_WRAPPERS = (collections.UserDict, collections.UserList)
# These look like containers by inheritance, and are values.
_VALUES = (Tensor, torch.nn.Module, enum.Enum, torch.Size)
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})

_learning = threading.Lock()
_learned: set[type] = set()


@dataclasses.dataclass(slots=True)
class OpenNode:
    """A container, opened: its children, and what it takes to close it around others."""

    node: object
    children: list[Any]
    entries: Sequence[Any]
    metadata: Any
    handler: Any

    def close(self, children: list[Any]) -> Any:
        """A container like this one around ``children``; this very one if they are its own."""
        if all(new is old for new, old in zip(children, self.children, strict=True)):
            return self.node
        return self.handler.unflatten_func(self.metadata, children)

    def name(self, child: int, parent: str) -> str:
        """What a reader would type to reach a child: ``x['a']``, ``x[0]``, ``x.field``."""
        kind = self.handler.path_entry_type
        entry = kind(self.entries[child], type(self.node), self.handler.kind)
        return str(entry.codify(parent))


def open_node(node: object) -> OpenNode | None:
    """Open a container by one level; None when ``node`` is a leaf."""
    cls = type(node)
    if cls in _ATOMS or isinstance(node, Tensor):
        return None
    handler = register_pytree_node.get(cls, namespace=NAMESPACE)
    if handler is None and _learn(cls):
        handler = register_pytree_node.get(cls, namespace=NAMESPACE)
    if handler is None:
        return None
    # Only flattening needs an order, and a set may be mapped without one.
    flatten = _open_set if isinstance(node, (set, frozenset)) else handler.flatten_func
    found, metadata, *rest = flatten(node)  # type: ignore[arg-type]
    children = list(found)
    entries = rest[0] if rest and rest[0] is not None else range(len(children))
    return OpenNode(node, children, tuple(entries), metadata, handler)


def nodes(nest: object) -> Iterator[object]:
    """Each distinct object of a nest once: containers and leaves, in no promised order."""
    seen: dict[int, object] = {}  # the objects too, so that no id is used twice
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
    """Teach allgrad a container type of yours.

        flatten(obj)              -> (children, rest)     rest: all that is no child, compared by ==
        unflatten(rest, children) -> obj                  a new one, children in the same order

    Types that optree knows globally need no second word here.
    """
    with _learning:
        if cls in _learned:  # met in a nest before: what its owner says counts for more
            unregister_pytree_node(cls, namespace=NAMESPACE)
            _learned.discard(cls)
        try:
            _add(cls, flatten, unflatten, optree.AutoEntry)
        except (TypeError, ValueError) as error:
            raise InputError(f"register: {cls!r} cannot be taught: {error}") from error


def learn_all(leaf_types: set[type]) -> bool:
    """Whether some of what optree took for leaves are containers; it knows them from now on."""
    return sum(map(_learn, leaf_types)) > 0


def _learn(cls: type) -> bool:
    """Enter a type met in a nest into the registry. False: its objects are leaves."""
    if cls in _ATOMS or issubclass(cls, _VALUES):
        return False
    if not (issubclass(cls, (*_CONTAINERS, *_WRAPPERS)) or dataclasses.is_dataclass(cls)):
        return False
    with _learning:
        if cls in _learned:  # another thread was first
            return True
        if issubclass(cls, dict):
            _add(cls, _open_mapping, _close_mapping, optree.MappingEntry)
        elif issubclass(cls, (list, collections.deque)):
            _add(cls, lambda items: (items, _Kept(items)), _close_sequence, optree.SequenceEntry)
        elif issubclass(cls, tuple):
            _add(cls, lambda items: (items, _Kept(items)), _close_tuple, optree.SequenceEntry)
        elif issubclass(cls, (set, frozenset)):
            _add(cls, _open_set_in_order, _close_set, optree.FlattenedEntry)
        else:
            _add(cls, _open_attributes, _close_attributes, optree.GetAttrEntry)
        _learned.add(cls)
    return True


def _add(cls: type, opener: Any, closer: Any, entry: type[optree.PyTreeEntry]) -> None:
    with warnings.catch_warnings():  # optree warns when a named tuple gets a meaning of its own
        warnings.simplefilter("ignore", UserWarning)
        register_pytree_node(cls, opener, closer, path_entry_type=entry, namespace=NAMESPACE)


class _Kept:
    """What a rebuilt container takes over from its model. Says nothing about its structure, so all are equal."""

    __slots__ = ("model",)

    def __init__(self, model: Any) -> None:
        self.model = model

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Kept)

    def __hash__(self) -> int:
        return hash(_Kept)

    def __repr__(self) -> str:
        return "..."


# Subclasses of the built-in containers: a copy of the model, filled anew. copy.copy is what a class
# can define for itself, and by default it does not run __init__.


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
            "which of them comes first would differ from rank to rank.\n"
            "Put them in a list, a tuple or a dict."
        )
    others.sort(key=lambda item: (type(item).__qualname__, repr(item)))
    return others + holders, type(items)


def _close_set(cls: type, children: Iterable[Any]) -> Any:
    return cls(children)


# Objects held together by attributes: dataclasses, and the wrappers of collections around ``.data``.


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
    """The attributes of an object, in slots or not, without what was computed from others."""
    state = object.__getstate__(holder)
    parts = state if isinstance(state, tuple) else (state,)
    found: dict[str, Any] = {}
    for part in parts:
        found |= part or {}
    cls = type(holder)
    return {
        name: value
        for name, value in found.items()
        if not isinstance(getattr(cls, name, None), functools.cached_property)
    }


def _set_attributes(new: Any, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        object.__setattr__(new, name, value)  # frozen dataclasses too


# PackedSequence: its data is the tensor; the index tensors say how to read it, and follow it to its
# device. batch_sizes stays on the CPU, where torch requires it.


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

    def beside(index: Tensor | None) -> Tensor | None:
        return index.to(data.device) if index is not None and isinstance(data, Tensor) else index

    return PackedSequence(
        data, layout.batch_sizes, beside(layout.sorted_indices), beside(layout.unsorted_indices)
    )


_add(PackedSequence, _open_packed, _close_packed, optree.GetAttrEntry)
