"""Calls that run in eager code between two graphs.

Imported while a graph is traced, and nowhere else: ``torch.compiler.disable`` loads TorchDynamo, which
takes a second and 80 MB.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["run_loss", "run_on_the_host", "run_routing"]

T = TypeVar("T")


@partial(
    torch.compiler.disable, reason="allgrad's losses run eagerly inside torch.func and lockstep"
)
def run_loss(loss: Callable[..., T], *args: Any, **options: Any) -> T:
    """A loss where no op of a graph can stand for it."""
    return loss(*args, **options)


@partial(torch.compiler.disable, reason="allgrad's dispatch reads counts on the host")
def run_routing(function: Callable[..., T], *args: Any, **options: Any) -> T:
    """``dispatch`` or ``combine``, whose sizes no graph knows."""
    return function(*args, **options)


@partial(torch.compiler.disable, reason="allgrad's module_state compares texts on the host")
def run_on_the_host(function: Callable[..., T], *args: Any, **options: Any) -> T:
    """A call of ``module_state``."""
    return function(*args, **options)
