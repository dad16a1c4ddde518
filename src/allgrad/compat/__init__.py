"""Functions of other libraries under their own names and signatures, made of ours.

Imports ``module_state``, ``devices``, ``collectives``, ``types``, ``_wire``, ``_core``, ``containers`` and
``errors``.
"""
