"""Products of float32 copies of 16-bit features, on a device: on tensor cores, where that is faster.

Products of bfloat16 or float16 are exact in float32, so scores lose nothing. Weights of bfloat16 features are
the sum of two numbers of 8 bits: they are off by 2^-17 of themselves, and the gradient is rounded to 2^-9 later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["similarities", "weighted_features"]

FEWEST = 2**31  # multiplications; fewer take less time than the launches
_NARROW = frozenset({torch.bfloat16, torch.float16})


def _is_faster(scores: int, x: Tensor, dtype: torch.dtype) -> bool:
    is_narrow = dtype in _NARROW and x.is_cuda and x.dtype == torch.float32
    return is_narrow and scores * x.shape[1] >= FEWEST


def similarities(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """``x @ y.T`` in the dtype of ``x``; both hold numbers of ``dtype``."""
    if _is_faster(len(x) * len(y), x, dtype):
        return torch.mm(x.to(dtype), y.to(dtype).T, out_dtype=torch.float32)
    return torch.mm(x, y.to(x.dtype).T)


def weighted_features(
    weights: Tensor, x: Tensor | None, y: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """``weights @ y`` and ``weights.T @ x``, each if the features are given."""
    given = next((z for z in (x, y) if z is not None), None)
    if given is None:
        return None, None
    if dtype != torch.bfloat16 or not _is_faster(weights.numel(), given, dtype):
        of_rows = None if y is None else torch.mm(weights, y.to(weights.dtype))
        return of_rows, None if x is None else torch.mm(weights.T, x)
    high = weights.bfloat16()
    low = (weights - high).bfloat16()

    def product(high: Tensor, low: Tensor, features: Tensor) -> Tensor:
        features = features.bfloat16()
        found = torch.mm(high, features, out_dtype=torch.float32)
        return torch.addmm(found, low, features, out_dtype=torch.float32, out=found)

    of_rows = None if y is None else product(high, low, y)
    return of_rows, None if x is None else product(high.T, low.T, x)
