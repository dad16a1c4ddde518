"""Adjoint pairs between the devices of one process: no ranks, no process group.

Imports ``containers``, ``_core`` and ``errors``.
"""

from allgrad.devices._arguments import Device
from allgrad.devices.transfers import broadcast, gather, reduce_add, scatter, to_device

__all__ = ["Device", "broadcast", "gather", "reduce_add", "scatter", "to_device"]
