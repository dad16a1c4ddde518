"""A training step on ranks beside the same step in one process: run, compare, name the mistake.

Imports ``testing`` (real ranks), ``nn`` (batch norm over ranks), ``containers``, ``_wire`` and ``errors``.
"""
