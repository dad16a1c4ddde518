"""A checkpoint computes its region again before a call of the region goes backward, on every rank.

torch.utils.checkpoint does so once backward comes to a tensor that the region has saved, and up to the last
such tensor. A linear collective needs none. So what each rank computes behind it would decide which ranks call
it again first, and which not at all:

    rank 0   all_reduce, exp        again: all_reduce     backward: all_reduce
    rank 1   all_reduce             backward: all_reduce  again: -

So a call inside of checkpoints makes a mark in each of them, a node that saves an empty tensor, and asks for
these tensors before it goes backward. Hooks for saved tensors are a stack, of which only the top sees what is saved: another
checkpoint inside of the first, or save_on_cpu around the call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from allgrad._core.torch_internals import (
    functorch_active,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    saved_tensor_hooks,
)

__all__ = ["come_to", "is_recomputing", "mark"]

_NOTHING = torch.empty(0, device="cpu")
_ANCHOR = torch.empty(0, device="cpu", requires_grad=True)


def mark(ctx: Any) -> None:
    """In forward of a call, behind what it sends: an early stop of a checkpoint leaves from here."""
    ctx.marks = () if saved_tensor_hooks() is None else _marks()


def come_to(ctx: Any) -> None:
    """In backward, before anything is sent."""
    for mark in ctx.marks:
        _ = mark.grad_fn.saved_tensors


def is_recomputing() -> bool:
    """Whether a checkpoint computes its region again."""
    hooks = saved_tensor_hooks()
    return hooks is not None and "_recomputation_hook" in getattr(hooks[0], "__qualname__", "")


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor) -> Tensor:
        ctx.save_for_backward(_NOTHING)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004
        return gradient


def _marks() -> tuple[Tensor, ...]:
    if functorch_active():  # there is no checkpoint inside of torch.func
        return ()
    popped, marks = [], []
    try:
        while (hooks := saved_tensor_hooks()) is not None:
            # Not where others look at what is saved: they may do anything with it.
            if getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint":
                with torch.enable_grad():
                    # Not the node alone: in torch 2.11 it loses what it saves together with the tensor.
                    marks.append(_Mark.apply(_ANCHOR))  # type: ignore[no-untyped-call]
            popped.append(hooks)
            pop_saved_tensor_hooks()
    finally:
        for hooks in reversed(popped):
            push_saved_tensor_hooks(*hooks)
    return tuple(marks)
