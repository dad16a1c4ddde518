"""Losses that are a mean of one term for each row, made in chunks of plain torch.

Inside ``losses`` it imports ``_arguments``, ``_tiles`` and ``_pairs``.
"""
