"""One file for each adjoint pair of collectives, and what they share.

Imports ``types``, ``_autograd``, ``_wire``, ``_core``, ``containers`` and ``errors``.
"""
