"""Cache of adjoint pairs by call signature: a repeated call skips the argument checks.

A training loop makes the same calls in every step; the checks would be half of the time of a small
one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from allgrad._wire.calls import group_key

if TYPE_CHECKING:
    from collections.abc import Hashable

    from allgrad._autograd.adjoint_pair import AdjointPair
    from allgrad._wire.groups import GroupLike

__all__ = ["hashable", "recall", "remember"]

_PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter})
_MOST = 4096
_PAIRS: dict[tuple[Hashable, ...], AdjointPair] = {}
_NO_KEY: list[object] = []  # cannot be hashed
_INT_ALONE = {int}


def hashable(sizes: object) -> object:
    """Sizes as part of a signature: whole numbers only, since tensors may change, and others, as 2.0, equal one."""
    if sizes is None or type(sizes) is str:
        return sizes
    if not isinstance(sizes, (list, tuple)) or set(map(type, sizes)) != _INT_ALONE:
        return _NO_KEY
    return tuple(sizes)


def recall(name: str, x: object, group: GroupLike, *given: object) -> AdjointPair | None:
    """The pair of a call with this signature; none while calls are described for checked mode.

    Signatures are compared by ==. A caller does not look up what is no int, but may equal one:
    True is no dim (test_what_equals_an_int_is_looked_at).
    """
    key = group_key(group)
    if key is None or type(x) not in _PLAIN_TYPES or x.is_nested:  # type: ignore[attr-defined]
        return None
    try:
        return _PAIRS.get((name, key, x.shape, x.dtype, x.layout, *given))  # type: ignore[attr-defined]
    except TypeError:  # an argument that cannot be hashed
        return None


def remember(pair: AdjointPair, name: str, x: object, group: GroupLike, *given: object) -> None:
    """Keep the pair of a call whose arguments were good, for the next one like it."""
    key = group_key(group)
    if key is None or type(x) not in _PLAIN_TYPES:
        return
    for argument in given:
        if isinstance(argument, Tensor):
            return  # it may have another value then (test_numbers_in_tensors_may_change)
    if len(_PAIRS) >= _MOST:
        _PAIRS.clear()
    try:
        _PAIRS[(name, key, x.shape, x.dtype, x.layout, *given)] = pair  # type: ignore[attr-defined]
    except TypeError:
        return
