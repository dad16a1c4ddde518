"""Losses compute in dtypes of their own choice, and on the device of their tensors."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["computed_on"]


def computed_on(device: torch.device, function: Callable[..., Any], *args: Any) -> Any:
    """Call it without autocast, and with this as the current device.

    Autocast changes the dtype of products, and its cat refuses the other dtype of 16 bits. Triton
    launches on the current device, wherever the tensors are.
    """
    is_cast = device.type != "meta" and torch.is_autocast_enabled(device.type)
    is_elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    if not is_cast and not is_elsewhere:
        return function(*args)
    with ExitStack() as stack:
        if is_cast:
            stack.enter_context(torch.autocast(device.type, enabled=False))
        if is_elsewhere:
            stack.enter_context(torch.cuda.device(device))
        return function(*args)
