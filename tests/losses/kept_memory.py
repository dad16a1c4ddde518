"""What a loss keeps between forward and backward."""

import weakref
from contextlib import nullcontext

import pytest
import torch


class Kept:
    """A tensor that autograd saved; it lives as long as autograd keeps it."""

    def __init__(self, tensor):
        self.tensor = tensor


def largest_kept(run, leaves, order):
    """The elements of the largest tensor that a loss keeps for backward, in graphs of its own too.

    With ``order`` 2, its gradient is computed with a graph, and what that keeps counts too.
    """
    kept = []

    def pack(t):
        held = Kept(t)
        kept.append(weakref.ref(held))
        return held

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(torch.autograd.graph, "saved_tensors_hooks", lambda *_: nullcontext())
        value = run()
        if order == 2:
            value = torch.autograd.grad(value, leaves, create_graph=True)
    alive = [held() for held in kept]
    tensors = [held.tensor for held in alive if held is not None]
    assert tensors
    return max(t.untyped_storage().nbytes() // t.element_size() for t in tensors)
