"""``allgrad demo``: two towers that match handwritten digits and captions.

Imports ``losses``, ``collectives`` and ``testing``.
"""
