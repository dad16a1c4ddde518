"""Calls like ones before them: found by what they are given, and checked no more.

A training loop makes the same calls in every step. What the checks of the first one made, its
adjoint pair, serves the next; of a small call the checks would be half of the time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from allgrad._wire import groups

if TYPE_CHECKING:
    from collections.abc import Hashable

    from allgrad._autograd.adjoint_pair import AdjointPair
    from allgrad._wire.primitives import GroupLike

__all__ = ["frozen", "recall", "remember"]

_PLAIN = frozenset({Tensor, torch.nn.Parameter})
_MOST = 4096
_PAIRS: dict[tuple[Hashable, ...], AdjointPair] = {}


def frozen(sizes: object) -> object:
    """Sizes as a call can be known by them."""
    return tuple(sizes) if isinstance(sizes, list) else sizes


def recall(name: str, x: object, group: GroupLike, *given: object) -> AdjointPair | None:
    """The pair of a call like this one, if there was any and calls need not be described."""
    among = groups.reference(group)
    if among is None or type(x) not in _PLAIN or x.is_nested:  # type: ignore[attr-defined]
        return None
    try:
        return _PAIRS.get((name, among, x.shape, x.dtype, x.layout, *given))  # type: ignore[attr-defined]
    except TypeError:  # an argument that cannot be looked up
        return None


def remember(pair: AdjointPair, name: str, x: object, group: GroupLike, *given: object) -> None:
    """Keep the pair of a call whose arguments were good, for the next like it."""
    among = groups.reference(group)
    if among is None or type(x) not in _PLAIN:
        return
    if len(_PAIRS) >= _MOST:
        _PAIRS.clear()
    try:
        _PAIRS[(name, among, x.shape, x.dtype, x.layout, *given)] = pair  # type: ignore[attr-defined]
    except TypeError:
        return
