"""Tensors that were made in inference mode, as by a frozen encoder, serve a loss outside of it as copies.

Torch refuses to save them for backward: on a rank that has them, while the others wait.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["of_autograd"]


def of_autograd(
    args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a loss as autograd can save them."""
    if torch.is_inference_mode_enabled():
        return args, options
    if not any(map(_is_of_inference, args)) and not any(map(_is_of_inference, options.values())):
        return args, options
    return tuple(map(_copied, args)), {name: _copied(x) for name, x in options.items()}


def _is_of_inference(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_inference()


def _copied(x: Any) -> Any:
    return x.clone() if _is_of_inference(x) else x
