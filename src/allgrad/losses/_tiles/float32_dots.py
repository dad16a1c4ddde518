"""Dot products of float32 features on tensor cores, exact but for the last bits.

Tensor cores multiply bfloat16, numbers of 8 bits. A number of 24 bits is the sum of three of them, exactly.
Of the nine products of parts, those that count are joined to one matrix product, the small ones first:

    [ q3 q1 q2 q2 q1 q1 ] @ [ k1 k3 k2 k1 k2 k1 ].T

An H200 takes half of the time of its float32 units for it. Tensor cores cut off what they add, so
the sum of the large products is made of short ones. Gradients sum up thousands of numbers: theirs stay
torch's own.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["dots_of_parts", "in_parts"]

FEWEST = 2**35  # multiplications; fewer take less time than the launches
_LONGEST = 256  # numbers that tensor cores sum up; with 512, gradients are a tenth further off


def in_parts(q: Tensor, k: Tensor) -> bool:
    """Whether this way is the faster one, where torch's switches do not allow TF32."""
    if q.dtype != torch.float32 or len(q) * len(k) * q.shape[1] < FEWEST:
        return False
    return torch.backends.cuda.matmul.fp32_precision != "tf32" and _has_fast_cores(q.device)


@cache
def _has_fast_cores(device: torch.device) -> bool:
    """Tensor cores that are more than six times as fast as the float32 units: A100, H100, B200."""
    return torch.cuda.get_device_capability(device) in {(8, 0), (9, 0), (10, 0), (10, 3)}


def dots_of_parts(q: Tensor, k: Tensor) -> Tensor:
    """``q @ k.T``."""
    (q1, q2, q3), (k1, k2, k3) = _parts(q), _parts(k)
    first, *others = (slice(start, start + _LONGEST) for start in range(0, q.shape[1], _LONGEST))
    left = torch.cat([q3, q1, q2, q2, q1, q1[:, first]], 1)
    right = torch.cat([k1, k3, k2, k1, k2, k1[:, first]], 1)
    dots = torch.mm(left, right.T, out_dtype=torch.float32)
    for more in others:
        torch.addmm(dots, q1[:, more], k1[:, more].T, out_dtype=torch.float32, out=dots)
    return dots


def _parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    first = x.bfloat16()
    rest = x - first
    second = rest.bfloat16()
    return first, second, (rest - second).bfloat16()
