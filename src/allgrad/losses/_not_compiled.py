"""Losses under torch.compile."""

from __future__ import annotations

from typing import TYPE_CHECKING, ParamSpec, TypeVar, cast

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["not_compiled"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


def not_compiled(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Under torch.compile, a graph break: the function runs eagerly."""
    return cast("Callable[_P, _T]", torch.compiler.disable(function))
