"""What a queue does in eager code between two graphs.

Imported while a graph is traced, and nowhere else, because it loads TorchDynamo.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["run_push"]


@partial(torch.compiler.disable, reason="allgrad's KeyQueue.push replaces the queue's buffers")
def run_push(push: Callable[..., None], *args: Any) -> None:
    """Push keys where no op of a graph can stand for it."""
    push(*args)
