"""Which tensors are DTensors, told without importing them."""

from __future__ import annotations

__all__ = ["is_dtensor"]


def is_dtensor(x: object) -> bool:
    """Tell whether each rank holds a piece of it only, as of a parameter under FSDP2."""
    return hasattr(x, "device_mesh") and hasattr(x, "placements")
