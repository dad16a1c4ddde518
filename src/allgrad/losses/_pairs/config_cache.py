"""Cache of configs by call signature: with sizes given, a repeated call skips the argument checks."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from allgrad._wire.calls import group_key
from allgrad.collectives._pair_cache import hashable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from allgrad.losses._pairs.config import LossConfig
    from allgrad.types import GroupLike, Sizes

__all__ = ["recall", "remember", "signature"]

_PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter})
_MOST = 1024
_CONFIGS: dict[object, LossConfig] = {}


def signature(
    name: str, group: GroupLike, sizes: Sizes, tensors: Iterable[Tensor | None], *options: object
) -> tuple[object, ...] | None:
    """A key of the call; None if it must be checked anew, as without sizes.

    Only the default group: a config holds its group, and the cache would keep others alive.
    """
    world = None if sizes is None or group is not None else group_key(None)
    if world is None:
        return None
    parts: list[object] = []
    for x in tensors:
        if x is not None and (type(x) not in _PLAIN_TYPES or x.is_nested):
            return None
        parts.append(x if x is None else (x.shape, x.dtype, x.device, x.layout))
    return name, world, torch.is_grad_enabled(), hashable(sizes), *parts, *options


def recall(key: tuple[object, ...] | None) -> LossConfig | None:
    try:
        return None if key is None else _CONFIGS.get(key)
    except TypeError:  # an option that cannot be hashed
        return None


def remember(key: tuple[object, ...] | None, config: LossConfig) -> None:
    """Keep the config of a call whose arguments were good.

    Not of one rank alone, whose config depends on which of its inputs require grad.
    """
    if key is None or config.layout.world == 1:
        return
    if any(isinstance(part, Tensor) for part in key):
        return  # an option that may have another value then (test_label_smoothing_in_a_tensor_may_change)
    if len(_CONFIGS) >= _MOST:
        _CONFIGS.clear()
    with suppress(TypeError):  # sizes in a tensor, numbers of NumPy: they cannot be hashed
        _CONFIGS[key] = config
