"""Mean and variance over the values of all ranks, in one message."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch

from allgrad.collectives.all_gather import all_gather

if TYPE_CHECKING:
    from torch import Tensor

    from allgrad.types import GroupLike

__all__ = ["Moments", "moments_over_ranks"]


class Moments(NamedTuple):
    """Own values less ``centre``, and the moments of all ranks' values; ``dims`` are of length 1."""

    centred: Tensor
    centre: Tensor
    mean: Tensor
    squares: Tensor  # the sum of (x - mean)^2 over all ranks
    number: Tensor  # of values, over all ranks


def moments_over_ranks(x: Tensor, dims: list[int], group: GroupLike) -> Moments:
    """Reduce over ``dims`` and over ranks.

    Each rank sends its mean, its centred squares and its count; the moments of all follow by the
    formula of Chan, Golub and LeVeque, which subtracts no large numbers. The values are used on
    every rank in its own way, so the gather has ``grad="sum"``.

    ``centre`` is a constant: sums of x - centre determine the moments for any constant, so the
    derivatives of every order are exact, and backward has one pass less.
    """
    if x.dtype in {torch.float16, torch.bfloat16}:
        x = x.float()
    n = prod([x.shape[d] for d in dims])  # a list: Dynamo takes no generator here
    fixed = x.detach()
    centre = fixed.mean(dims, keepdim=True) if n else fixed.sum(dims, keepdim=True)
    centred = x - centre
    total = centred.sum(dims, keepdim=True)
    beside = total / max(n, 1)
    squares = centred.square().sum(dims, keepdim=True) - total * beside
    shape, features = centre.shape, centre.numel()
    own = torch.cat([(centre + beside).flatten(), squares.flatten(), centre.new_full((1,), n)])
    rows = all_gather(own[None], sizes="equal", group=group)
    means, squares, counts = rows.split([features, features, 1], 1)
    counts = counts.detach()
    number = counts.sum()
    mean = (means * counts).sum(0) / number.clamp(min=1)
    squares = (squares + (means - mean).square() * counts).sum(0)
    return Moments(centred, centre, mean.view(shape), squares.view(shape), number)
