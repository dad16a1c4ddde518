"""Collectives with exact gradients for PyTorch."""

__version__ = "0.1.0"
