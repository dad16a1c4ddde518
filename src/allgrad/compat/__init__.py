"""Other libraries' functions by their own names and signatures, made of ours.

Imports everything below: ``collectives``, ``devices``, ``module_state``.
"""
