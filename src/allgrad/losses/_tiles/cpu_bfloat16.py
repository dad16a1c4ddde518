"""Products of bfloat16 features by a CPU's own instructions for them.

Torch rounds such a product to bfloat16, though the CPU sums it in float32. That is enough for gradients,
which are rounded in the end anyway. Scores are exponents and need more digits. A second product, minus the
first, gives what the rounding took off:

    rounded  =  round(q @ k.T)
    rest     =  round(q @ k.T - rounded)
    scores   =  rounded + rest               off by 2^-17 of themselves at most
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

from allgrad._core.torch_internals import cpu_capabilities

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["multiplies_bfloat16", "multiplies_twice", "product_of_two"]

# Multiplications; for fewer, putting the matrices in order takes longer than the product.
FROM = 2**23


def multiplies_bfloat16(x: Tensor, columns: int) -> bool:
    """Whether a product of ``x`` and so many columns takes less time in bfloat16 than in float32."""
    is_long = x.numel() * columns >= FROM
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and is_long and _speed() > 1


def multiplies_twice(x: Tensor, columns: int) -> bool:
    """Whether even two of them take less time than one in float32."""
    return multiplies_bfloat16(x, columns) and _speed() > 2


@cache
def _speed() -> int:
    """About how many products of bfloat16 take as long as one of float32."""
    found = cpu_capabilities()
    return 8 if found.get("amx_bf16") else 2 if found.get("avx512_bf16") else 1


def product_of_two(q: Tensor, k: Tensor, out: Tensor) -> Tensor:
    """``q @ k.T`` in float32, with all digits that count, in the memory of ``out``."""
    rounded = torch.mm(q, k.T)
    out.copy_(rounded)
    return out.add_(torch.addmm(rounded, q, k.T, beta=-1))
