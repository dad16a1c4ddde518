"""Nests of tensors: flatten, map, unflatten.

A nest is a tensor, or any mix of dicts, lists, tuples, named tuples, deques, sets, dataclasses,
``PackedSequence`` and types registered with :func:`register`, to any depth. Everything else in it
is a leaf and is kept as it is.

The order of the leaves is the same on every rank: a dict is flattened by sorted keys, whatever its
insertion order. Tensors under keys that cannot be sorted (enum members, types, dtypes, sets) go by the
text of their keys in :func:`tensors` and :func:`split_tensors`. A rebuilt dict keeps the insertion order
of the original.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import optree
from optree import PyTreeSpec as Structure
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from allgrad.containers.key_texts import keys_and_order, path_name
from allgrad.containers.kinds import (
    NAMESPACE,
    OpenNode,
    named_tuples_to_register,
    open_node,
    register,
    register_all,
)
from allgrad.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = [
    "Frame",
    "Structure",
    "flatten",
    "map_tensors",
    "register",
    "split_tensors",
    "tensors",
    "unflatten",
]

_Nest = TypeVar("_Nest")


def flatten(nest: object) -> tuple[list[Any], Structure]:
    """Flatten a nest into its leaves and its structure.

        {"b": x, "a": [y, 3]}   --->   [y, 3, x]   and   {'a': [*, *], 'b': *}

    Structures are equal when containers, lengths and keys are equal; leaves are not compared.
    """
    tree: optree.PyTree[Any] = nest  # type: ignore[assignment]
    while True:
        try:
            leaves, structure = optree.tree_flatten(tree, none_is_leaf=True, namespace=NAMESPACE)
        except RecursionError as error:
            map_tensors(lambda tensor: tensor, nest)  # raises an error that names a cycle
            raise InputError(
                f"This nest is too deep: more than {optree.MAX_RECURSION_DEPTH} containers "
                "inside one another.\nFlatten its innermost levels before the call."
            ) from error
        types = {type(leaf) for leaf in leaves} | named_tuples_to_register(structure)
        if not register_all(types):
            return leaves, structure


def unflatten(structure: Structure, leaves: Iterable[object]) -> Any:
    """Rebuild a nest from a structure and leaves; the inverse of :func:`flatten`."""
    leaves = list(leaves)
    if len(leaves) != structure.num_leaves:
        raise InputError(
            f"Leaves in this structure: {structure.num_leaves}; given: {len(leaves)}.\n"
            f"  {structure}"
        )
    return structure.unflatten(leaves)


def tensors(nest: object) -> list[Tensor]:
    """The tensors of a nest, in its order; one that appears twice is listed twice."""
    return split_tensors(nest)[0]


class Frame:
    """A nest without its tensors. Call it with as many tensors to rebuild the nest around them.

    Frames are equal when their structures are equal and the same leaves are tensors; the other
    leaves may differ.
    """

    __slots__ = ("_keys", "_leaves", "_optree_sorts", "_positions", "structure")

    def __init__(self, leaves: list[Any], structure: Structure) -> None:
        """The frame of a flattened nest; it keeps no reference to the tensors among ``leaves``."""
        self.structure = structure
        positions = tuple([i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)])
        self._keys, order = _known_keys(structure, positions)
        self._positions = order or positions
        self._optree_sorts = order is None
        self._leaves: list[Any] | None = None  # where all are tensors, in the structure's order
        if order or len(positions) != len(leaves):
            self._leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def __call__(self, tensors: Sequence[object]) -> Any:
        """The nest around ``tensors``, given in the order of :func:`split_tensors`."""
        if len(tensors) != len(self._positions):
            raise InputError(
                f"Tensors in this nest: {len(self._positions)}; given: {len(tensors)}.\n"
                f"  {self.structure}"
            )
        if self._leaves is None:
            return self.structure.unflatten(tensors)
        leaves = self._leaves.copy()
        for position, tensor in zip(self._positions, tensors, strict=True):
            leaves[position] = tensor
        return self.structure.unflatten(leaves)

    def names(self, nest: str = "x") -> list[str]:
        """The Python expression for each tensor: ``["x['a'][0]", "x['b'].mask"]``.

        Ranks that hold the same nest have the same names.
        """
        accessors = self.structure.accessors()
        if not self._optree_sorts:
            return [path_name(accessors[position], nest) for position in self._positions]
        return [str(accessors[position].codify(nest)) for position in self._positions]

    def keys(self) -> str:
        """The keys that lead to each tensor, as one text: ``"['a'][0], ['b']['mask']"``.

        Of a key that is no text, number, enum member, dataclass, tuple, set, dtype, device or type only the type
        is named: its repr may differ between ranks.
        """
        return self._keys

    def take(self, leaves: Sequence[Any]) -> list[Tensor]:
        """The tensors among the leaves of the structure, in the order of the frame."""
        return [leaves[position] for position in self._positions]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Frame)
            and self._positions == other._positions
            and self.structure == other.structure
        )

    def __hash__(self) -> int:
        # TorchDynamo (2.11) asks for the hash of an object whose __init__ has not run yet.
        return hash((getattr(self, "_positions", None), getattr(self, "structure", None)))

    def __repr__(self) -> str:
        return f"Frame({len(self._positions)} tensors in {self.structure})"


def _known_keys(
    structure: Structure, positions: tuple[int, ...]
) -> tuple[str, tuple[int, ...] | None]:
    """Made once for each structure, while no compiler traces."""
    if is_dynamo_compiling():
        return keys_and_order(structure.paths(), positions)
    if structure.namespace:  # it holds on to objects of the caller
        return _known_paths(tuple(structure.paths()), positions)
    try:
        return _known_structure(structure, positions)
    except TypeError:  # a type of the caller's with parts that cannot be hashed
        return keys_and_order(structure.paths(), positions)


@lru_cache(maxsize=256)
def _known_structure(
    structure: Structure, positions: tuple[int, ...]
) -> tuple[str, tuple[int, ...] | None]:
    return keys_and_order(structure.paths(), positions)


_known_paths = lru_cache(maxsize=256)(keys_and_order)


def split_tensors(nest: object) -> tuple[list[Tensor], Frame]:
    """Split a nest into its tensors, in order, and the frame around them.

    {"b": x, "a": [y, 3]}   --->   [y, x]   and   {"b": _, "a": [_, 3]}
    """
    leaves, structure = flatten(nest)
    frame = Frame(leaves, structure)
    return frame.take(leaves), frame


def map_tensors(fn: Callable[[Tensor], object], nest: _Nest) -> _Nest:
    """A nest with ``fn(tensor)`` instead of each tensor. The original is not changed.

        fn, {"b": x, "a": [y, x], "c": [3]}   --->   {"b": X, "a": [Y, X], "c": [3]}

    - ``fn`` runs once for each tensor object: a tensor held twice is one tensor afterwards.
    - A container in which nothing changed is returned as it is, not copied.
    - In a ``PackedSequence`` the data is mapped; its indices are moved to the device of the new data.
    - In a dataclass the fields are mapped; other attributes are kept, ``__init__`` is not run.

    Any depth works. A container that holds itself raises :class:`~allgrad.errors.InputError`.
    """
    if is_dynamo_compiling():
        return _map_in_graph(fn, nest, {})  # type: ignore[no-any-return]
    done: dict[int, tuple[object, Any]] = {}  # keeps the objects alive, so that ids stay unique
    path: list[tuple[OpenNode, list[Any]]] = []  # the open containers, each with its new children
    depths: dict[int, int] = {}  # position on the path of each open container
    node: Any = nest
    while True:
        # Descend to the first node that has a result, ...
        while id(node) not in done:
            if id(node) in depths:
                raise _cycle(path, depths[id(node)])
            opened = open_node(node)
            if opened is None:
                done[id(node)] = (node, fn(node) if isinstance(node, Tensor) else node)
            elif opened.children:
                depths[id(node)] = len(path)
                path.append((opened, []))
                node = opened.children[0]
            else:
                done[id(node)] = (node, node)
        # ... pass it up, rebuild every container that is now complete, ...
        result = done[id(node)][1]
        while path:
            opened, results = path[-1]
            results.append(result)
            if len(results) < len(opened.children):
                break
            path.pop()
            result = opened.close(results)
            done[id(opened.node)] = (opened.node, result)
        if not path:
            return result  # type: ignore[no-any-return]
        # ... and continue with the next child of the innermost open container.
        opened, results = path[-1]
        node = opened.children[len(results)]


def _map_in_graph(fn: Callable[[Tensor], object], node: Any, done: dict[int, Any]) -> Any:
    """The same while TorchDynamo traces, which knows the ids of tensors only (torch 2.11)."""
    if isinstance(node, Tensor):
        if id(node) not in done:
            done[id(node)] = fn(node)
        return done[id(node)]
    opened = open_node(node)
    if opened is None or not opened.children:
        return node
    return opened.close([_map_in_graph(fn, child, done) for child in opened.children])


def _cycle(path: list[tuple[OpenNode, list[Any]]], depth: int) -> InputError:
    """The error for a container that is reached again below itself."""
    names = ["x"]
    for opened, results in path:
        names.append(opened.name(len(results), names[-1]))
    return InputError(
        f"{_shortened(names[-1])} refers back to {_shortened(names[depth])}: "
        "a nest of tensors must not contain itself.\n"
        "Remove this reference before the call."
    )


def _shortened(name: str, most: int = 200) -> str:
    return name if len(name) <= most else f"{name[: most // 2]} ... {name[-most // 2 :]}"
