"""What wrappers do with the ranks' gradients, and how to make them sum.

Imports ``_wire``, ``_core`` and ``errors``.
"""

from allgrad.wrappers.gradient_scale import GradientScale, gradient_scale, sum_gradients

__all__ = ["GradientScale", "gradient_scale", "sum_gradients"]
