"""``allgrad bench``: the collectives beside their peers, in one interleaved run.

Imports ``collectives``, ``testing``; its baselines use ``torch.distributed``.
"""
