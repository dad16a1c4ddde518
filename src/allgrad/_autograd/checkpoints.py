"""A checkpoint computes its region again before a call of the region goes backward, on every rank.

torch.utils.checkpoint does so once backward comes to a tensor that the region has saved, and up to the last
such tensor. A linear collective needs none. So what each rank computes behind it would decide which ranks call
it again first, and which not at all:

    rank 0   all_reduce, exp        again: all_reduce     backward: all_reduce
    rank 1   all_reduce             backward: all_reduce  again: -

Where hooks for saved tensors are in force, a call saves an empty tensor, and asks for it before it goes backward.
"""

from __future__ import annotations

from typing import Any

import torch

from allgrad._core.torch_internals import saved_tensor_hooks

__all__ = ["come_to", "mark"]

_NOTHING = torch.empty(0, device="cpu")


def mark(ctx: Any) -> None:
    """In forward of a call, as the only tensor that it saves."""
    ctx.is_marked = saved_tensor_hooks() is not None
    if ctx.is_marked:
        ctx.save_for_backward(_NOTHING)


def come_to(ctx: Any) -> None:
    """In backward, before anything is sent."""
    if ctx.is_marked:
        _ = ctx.saved_tensors
