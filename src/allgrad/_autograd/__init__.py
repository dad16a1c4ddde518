"""Differentiation: an adjoint pair becomes a function that works in every mode of torch.

Holds lockstep and async calls too. Imports ``_wire``, ``_core`` and ``errors``.
"""
