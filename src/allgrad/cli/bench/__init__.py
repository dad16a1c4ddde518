"""``allgrad bench``: the collectives and their peers, in one interleaved run.

Imports ``collectives``, ``testing``; its baselines use ``torch.distributed``.
"""
