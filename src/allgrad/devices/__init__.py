"""Adjoint pairs between the devices of one process: no ranks, no messages.

Imports ``containers``, ``_core`` and ``errors``.
"""

from allgrad.devices.transfers import Device, broadcast, gather, reduce_add, scatter, to_device

__all__ = ["Device", "broadcast", "gather", "reduce_add", "scatter", "to_device"]
