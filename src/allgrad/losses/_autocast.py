"""Losses compute in dtypes of their own choice, whatever autocast says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["outside_autocast"]


def outside_autocast(compute: Callable[..., Any], *args: Any, device: str) -> Any:
    """Call it without autocast, which would change products, and refuse to join what it did not make."""
    if device == "meta" or not torch.is_autocast_enabled(device):  # meta has no autocast
        return compute(*args)
    with torch.autocast(device, enabled=False):
        return compute(*args)
