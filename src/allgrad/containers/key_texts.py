"""Keys of a nest as texts: equal on every rank that holds equal keys, and an order where keys have none.

A repr may hold an address, or list the members of a set in an order of its own, and so differ
between ranks that hold the same key.
"""

from __future__ import annotations

import dataclasses
import enum
from itertools import pairwise
from numbers import Number
from typing import TYPE_CHECKING, Any

import optree
import torch

from allgrad.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["keys_and_order", "path_name"]


def keys_and_order(
    paths: Sequence[tuple[object, ...]], positions: Sequence[int]
) -> tuple[str, tuple[int, ...] | None]:
    """The keys that lead to each position, as one text, and the positions in the order of the text.

    No order, None, where optree has sorted all keys: it leaves what cannot be compared, and sets,
    which it compares by inclusion, in the order of insertion.
    """
    texts = ["".join([f"[{_key_text(key, _type_name)}]" for key in paths[at]]) for at in positions]
    if all(isinstance(key, (str, int, float)) for at in positions for key in paths[at]):
        return ", ".join(texts), None
    ordered = sorted(zip(texts, positions, strict=True), key=lambda pair: pair[0])
    for (text, one), (next_text, other) in pairwise(ordered):
        if text == next_text:
            _require_order(paths[one], paths[other], text)
    return ", ".join([text for text, _ in ordered]), tuple([at for _, at in ordered])


def path_name(accessor: optree.PyTreeAccessor, nest: str) -> str:
    """The expression for one leaf, with its keys as texts: ``x['b'][Modality.IMAGE].mask``."""
    for entry in accessor:
        if isinstance(entry, optree.MappingEntry):
            nest = f"{nest}[{_key_text(entry.entry, repr)}]"
        else:
            nest = str(entry.codify(nest))
    return nest


def _key_text(key: Any, other_text: Callable[[object], str]) -> str:
    """Equal keys have one text: a cache by equality must give the same on every rank."""
    if isinstance(key, str):
        return repr(str.__str__(key))
    if isinstance(key, int):
        return str(int(key))
    if isinstance(key, Number):
        return _number_text(key, other_text)
    if isinstance(key, bytes):
        return repr(bytes(key))
    if isinstance(key, tuple):
        return f"({', '.join([_key_text(part, other_text) for part in key])})"
    if isinstance(key, frozenset):
        return f"{{{', '.join(sorted([_key_text(part, other_text) for part in key]))}}}"
    if isinstance(key, enum.Enum):  # after the types of which an enum member may be a value
        return f"{type(key).__qualname__}.{key.name}"
    if key is None or isinstance(key, (torch.dtype, torch.device)):
        return str(key)
    if isinstance(key, type):
        return f"type {key.__qualname__}"
    if dataclasses.is_dataclass(key) and type(key).__hash__ is not object.__hash__:
        fields = [getattr(key, field.name) for field in dataclasses.fields(key) if field.compare]
        return f"{type(key).__qualname__}{_key_text(tuple(fields), other_text)}"
    return other_text(key)


def _require_order(path: Sequence[object], other: Sequence[object], text: str) -> None:
    """Keys of one text stay in optree's order: sorted, or else that of insertion.

    The second is all that objects compared by identity have. Of others it may differ between ranks.
    """
    for one, another in zip(path, other, strict=False):
        if one is not another and not (_is_compared_by_identity(one) or _is_sorted(one, another)):
            raise InputError(
                f"a nest has two tensors under keys that are both {text} as a text, {one!r} and {another!r}: the "
                "ranks could not tell which of theirs is which.\nUse keys that are text, numbers, enum members, "
                "dataclasses, or tuples of these."
            )


def _is_compared_by_identity(key: object) -> bool:
    if isinstance(key, (tuple, frozenset)):
        return all(map(_is_compared_by_identity, key))
    return type(key).__hash__ in {object.__hash__, torch.Tensor.__hash__}


def _is_sorted(one: Any, another: Any) -> bool:
    try:
        return one == another or bool(one < another) != bool(another < one)
    except TypeError:
        return False


def _number_text(number: Any, other_text: Callable[[object], str]) -> str:
    for plain in (int, float, complex):
        try:
            converted = plain(number)
        except (TypeError, ValueError, OverflowError):
            continue
        if converted == number:
            return repr(converted)
    return other_text(number)


def _type_name(value: object) -> str:
    return type(value).__qualname__
