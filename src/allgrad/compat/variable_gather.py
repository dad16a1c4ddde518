"""The gather of unequal pieces found in many repositories, with exact gradients and no padding.

The calls are those of ``distributed.py`` in gigagan-pytorch, x-clip, st-moe-pytorch and
soft-moe-pytorch. There a rank gets the gradient of its own loss only, without the gradients of the
other ranks' losses with respect to its piece; here it gets the sum of all. ``grad="same"`` keeps the
own part only, for a loss that is the same on every rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

import allgrad as ag
from allgrad._wire import primitives as wire
from allgrad.collectives._inputs import check_grad, take_leaves
from allgrad.collectives._size_exchange import held_pieces
from allgrad.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from allgrad.types import Grad, GroupLike

__all__ = ["AllGather", "all_gather", "all_gather_variable_dim", "pad_dim_to"]


def all_gather(
    t: Tensor,
    dim: int = 0,
    sizes: Tensor | Sequence[int] | None = None,
    *,
    group: GroupLike = None,
    grad: Grad = "sum",
) -> tuple[Tensor, Tensor | None]:
    """All pieces joined along ``dim``, and their lengths by rank; in a world of one, ``(t, None)``.

    The lengths are a tensor; given as ``sizes`` to the next call, they save the size exchange.
    """
    check_grad("all_gather", grad, same=True)
    if wire.resolve("all_gather", group).size == 1:
        return (t.detach() if grad == "none" else t), None
    return all_gather_variable_dim(t, dim, sizes, group=group, grad=grad)


def all_gather_variable_dim(
    t: Tensor,
    dim: int = 0,
    sizes: Tensor | Sequence[int] | None = None,
    *,
    group: GroupLike = None,
    grad: Grad = "sum",
) -> tuple[Tensor, Tensor | None]:
    """The same; a process group of one rank also returns its length, no process group returns None.

    The original has no gradient: ``grad="none"`` gives the same.
    """
    ranks = wire.resolve("all_gather", group)
    if not ranks.group.name:
        return all_gather(t, dim, grad=grad)
    if sizes is None:
        lengths = held_pieces(ranks, t, dim, None)[1].sizes[0]
    else:
        lengths = tuple(sizes.flatten().tolist() if isinstance(sizes, Tensor) else sizes)
    joined = ag.all_gather(t, dim, sizes=lengths, group=group, grad=grad)
    if isinstance(sizes, Tensor):
        return joined, sizes
    return joined, torch.tensor(lengths, dtype=torch.int64, device=t.device)


class AllGather(nn.Module):
    """:func:`all_gather_variable_dim` as a module."""

    def __init__(self, *, dim: int = 0, group: GroupLike = None, grad: Grad = "sum") -> None:
        """Gather along ``dim`` over ``group``, with the gradient that ``grad`` names."""
        super().__init__()
        check_grad("AllGather", grad, same=True)
        self.dim, self.group, self.grad = dim, group, grad

    def forward(
        self, x: Tensor, sizes: Tensor | Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """All pieces joined, and their lengths by rank."""
        return all_gather_variable_dim(x, self.dim, sizes, group=self.group, grad=self.grad)


def pad_dim_to(t: Tensor, length: int, dim: int = 0) -> Tensor:
    """The tensor padded with zeros at the end of ``dim``, up to ``length``.

    The original truncates a longer tensor; here that raises.
    """
    leaves, (dim,) = take_leaves("pad_dim_to", t).along("pad_dim_to", dim)
    (vector,) = leaves.tensors
    missing = length - vector.shape[dim]
    if missing < 0:
        raise InputError(
            f"pad_dim_to: length={length}, but dim {dim} of shape {tuple(vector.shape)} is longer.\n"
            "Give a larger length, or shorten the tensor with narrow."
        )
    padding = [*vector.shape[:dim], missing, *vector.shape[dim + 1 :]]
    return torch.cat([vector, vector.new_zeros(padding)], dim)
