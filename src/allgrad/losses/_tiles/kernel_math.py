"""Arithmetic that the Triton kernels share, to base 2."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "LN2",
    "LOG2E",
    "fast_log2",
    "fast_reciprocal",
    "finite",
    "log2_1p",
    "sigmoid2",
    "softplus2",
]

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def fast_log2(x):
    """Triton's own log2 is a polynomial, several times as long as all else that a score needs."""
    return tl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def fast_reciprocal(x):
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def log2_1p(x, log2_of_1p):
    """log2(1 + x) for x from 0 on; 1 + x rounds a small x away, three terms of the series keep it."""
    series = x * (1.0 - x * (0.5 - x * 0.3333333333)) * LOG2E
    return tl.where(x < 0.01, series, log2_of_1p)


@triton.jit
def softplus2(x):
    """log2(1 + 2^x)."""
    small = tl.exp2(-tl.abs(x))
    return tl.maximum(x, 0.0) + log2_1p(small, tl.log2(1.0 + small))


@triton.jit
def sigmoid2(x):
    """1 / (1 + 2^-x)."""
    small = tl.exp2(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def finite(top):
    """Replace a maximum of -inf, that of a row of nothing but a pair: -inf - -inf would be NaN."""
    return tl.where(top == float("-inf"), 0.0, top)
