"""exp and logsumexp of scores, as fast for scores far below the highest as for others.

On a CPU torch's exp takes 15 to 40 times as long where the result is below 1e-38, in float32: at scale 100, of
scores that a similarity of 0.9 separates. Its exp2 does not, and takes a fourth of the time of exp elsewhere.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["exp_", "logsumexp"]

LOG2_E = 1 / math.log(2)


def exp_(x: Tensor) -> Tensor:
    """``exp(x)``, in the memory of ``x``."""
    return x.mul_(LOG2_E).exp2_() if x.device.type == "cpu" else x.exp_()


def logsumexp(x: Tensor, dim: int) -> Tensor:
    """Torch's, with derivatives that add up to 1, and are 0 where all of ``x`` is -inf.

    Torch's are off by the rounding of ``x``: where one is close to 1, the second derivative, and the first of a
    difference, lose their digits (test_derivatives_of_large_scores_keep_their_digits).
    """
    if not x.shape[dim]:
        return x.logsumexp(dim)
    top = x.detach().amax(dim, keepdim=True)
    none = (top == -torch.inf).squeeze(dim)
    top = torch.where(top == -torch.inf, 0, top)
    total = torch.where(none, 1, exp_(x - top).sum(dim))
    return torch.where(none, -torch.inf, total.log() + top.squeeze(dim))
