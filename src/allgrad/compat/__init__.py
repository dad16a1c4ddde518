"""Functions of other libraries under their own names and signatures, made of ours.

Imports everything below: ``collectives``, ``devices``, ``module_state``.
"""
