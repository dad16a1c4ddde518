"""The spread of the samples of all ranks, as one more channel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from allgrad.errors import InputError, TensorError
from allgrad.nn._moments import gather_moments
from allgrad.nn._ranks import refuse, require_tensors

if TYPE_CHECKING:
    from torch import Tensor

    from allgrad.types import GroupLike

__all__ = ["minibatch_stddev"]


def minibatch_stddev(
    x: Tensor, *, channels: int = 1, eps: float = 1e-8, group: GroupLike = None
) -> Tensor:
    """Append to each sample how much the samples of all ranks differ.

        rank 0   [ a a ]              [ a+s a+s ]
        rank 1   [ b ]       --->     [ b+s ]            s: spread of aabccc
        rank 2   [ c c c ]            [ c+s c+s c+s ]

    ``s`` is the standard deviation of each feature over the joined batch, sqrt(variance + eps),
    averaged over all features; with ``channels=n`` over each of n equal parts of the channels,
    which gives n more channels. Samples are (N, C, ...), any N on each rank.

    Gradient: exact to any order. Each rank's samples get ``s`` appended, hence ``grad="sum"``.

    Cost: one message of two numbers for each feature, from each rank to each, both ways.
    """
    require_tensors("minibatch_stddev", group, x=x)
    if x.dim() < 2 or not x.is_floating_point():
        problem: InputError = TensorError(
            f"minibatch_stddev: x is {tuple(x.shape)} {x.dtype}, not (N, C, ...) of floating-point "
            "numbers.\nGive samples first, then the channels."
        )
        refuse("minibatch_stddev", group, problem)
    if channels < 1 or x.shape[1] % channels:
        problem = InputError(
            f"minibatch_stddev: {x.shape[1]} channels do not divide by channels={channels}.\n"
            "Give a number that divides them."
        )
        refuse("minibatch_stddev", group, problem)
    found = gather_moments(x.flatten(1), group).join()
    spread = (found.squares / found.number.clamp(min=1) + eps).sqrt()
    parts = spread.view(1, channels, -1).mean(2)
    shape = (x.shape[0], channels, *x.shape[2:])
    more = parts.view(1, channels, *[1] * (x.dim() - 2)).expand(shape)
    return torch.cat([x, more.to(x.dtype)], 1)
