"""Nests of tensors: taken apart, mapped and put back.

A nest is a tensor, or any mix of dicts, lists, tuples, named tuples, deques, sets, dataclasses,
``PackedSequence`` and types taught with :func:`register`, to any depth. Everything else in it is a
leaf and is kept as it is.

The order of a nest is the same on every rank: dicts go by their sorted keys, whatever order they
were filled in. What is built from a dict keeps the order it was filled in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import optree
from optree import PyTreeSpec as Structure
from torch import Tensor

from allgrad.containers.kinds import NAMESPACE, OpenNode, learn_all, open_node, register
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
    """Take a nest apart into its leaves and its structure.

        {"b": x, "a": [y, 3]}   --->   [y, 3, x]   and   {'a': [*, *], 'b': *}

    Structures are equal when the containers, their lengths and their keys are; leaves do not count.
    """
    tree: optree.PyTree[Any] = nest  # type: ignore[assignment]
    while True:
        try:
            leaves, structure = optree.tree_flatten(tree, none_is_leaf=True, namespace=NAMESPACE)
        except RecursionError as error:
            map_tensors(lambda tensor: tensor, nest)  # a cycle is named here
            raise InputError(
                f"This nest is too deep: more than {optree.MAX_RECURSION_DEPTH} containers "
                "inside one another.\nFlatten its innermost levels before the call."
            ) from error
        if not learn_all({type(leaf) for leaf in leaves}):
            return leaves, structure


def unflatten(structure: Structure, leaves: Iterable[object]) -> Any:
    """Put leaves back into a structure; the inverse of :func:`flatten`."""
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
    """A nest with its tensors taken out. Call it with others, as many, to get the nest around them.

    Frames are equal when their structures are and tensors stand in the same places; the other
    leaves may differ.
    """

    __slots__ = ("_leaves", "_places", "structure")

    def __init__(self, leaves: list[Any], structure: Structure) -> None:
        """The frame of a flattened nest; the tensors among ``leaves`` are let go."""
        self.structure = structure
        self._places = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
        self._leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def __call__(self, tensors: Sequence[object]) -> Any:
        """The nest around ``tensors``, given in the order of :func:`split_tensors`."""
        if len(tensors) != len(self._places):
            raise InputError(
                f"Tensors in this nest: {len(self._places)}; given: {len(tensors)}.\n"
                f"  {self.structure}"
            )
        leaves = self._leaves.copy()
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        return self.structure.unflatten(leaves)

    def names(self, nest: str = "x") -> list[str]:
        """How to reach each tensor from the nest: ``["x['a'][0]", "x['b'].mask"]``.

        The same text on every rank that holds the same nest.
        """
        accessors = self.structure.accessors()
        return [str(accessors[place].codify(nest)) for place in self._places]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Frame)
            and self._places == other._places
            and self.structure == other.structure
        )

    def __hash__(self) -> int:
        return hash((self._places, self.structure))

    def __repr__(self) -> str:
        return f"Frame({len(self._places)} tensors in {self.structure})"


def split_tensors(nest: object) -> tuple[list[Tensor], Frame]:
    """Take the tensors out of a nest, in its order, and keep the frame to put others in.

    {"b": x, "a": [y, 3]}   --->   [y, x]   and   {"b": _, "a": [_, 3]}
    """
    leaves, structure = flatten(nest)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)], Frame(leaves, structure)


def map_tensors(fn: Callable[[Tensor], object], nest: _Nest) -> _Nest:
    """The nest with ``fn(tensor)`` in the place of each tensor. The nest itself is left as it was.

        fn, {"b": x, "a": [y, x], "c": [3]}   --->   {"b": X, "a": [Y, X], "c": [3]}

    - ``fn`` runs once for each tensor object: what was shared stays shared.
    - A container in which nothing changed is returned itself, not a copy.
    - Of a ``PackedSequence`` the data is mapped; its indices follow to the new data's device.
    - Of a dataclass the fields are mapped; other attributes are kept, ``__init__`` is not run.

    Any depth works. A container that holds itself raises :class:`~allgrad.errors.InputError`.
    """
    done: dict[int, tuple[object, Any]] = {}  # the objects too, so that no id is used twice
    path: list[tuple[OpenNode, list[Any]]] = []  # the open containers, each with its new children
    depths: dict[int, int] = {}  # where on the path each container was opened
    node: Any = nest
    while True:
        # Go down to the first thing that has a result, ...
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
        # ... hand it up, closing what it completes, ...
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
        # ... and go on with the next child of the container still open.
        opened, results = path[-1]
        node = opened.children[len(results)]


def _cycle(path: list[tuple[OpenNode, list[Any]]], depth: int) -> InputError:
    """The child now looked at, at the end of ``path``, is the container at ``depth`` again."""
    names = ["x"]
    for opened, results in path:
        names.append(opened.name(len(results), names[-1]))
    return InputError(
        f"{_shortened(names[-1])} refers back to {_shortened(names[depth])}: "
        "a nest of tensors must end somewhere.\n"
        "Take this reference out before the call."
    )


def _shortened(name: str, most: int = 200) -> str:
    return name if len(name) <= most else f"{name[: most // 2]} ... {name[-most // 2 :]}"
