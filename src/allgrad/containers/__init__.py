"""Nests of tensors: flatten, map, rebuild; the arguments of a call.

No communication. Imports ``errors``.
"""

from allgrad.containers.call_arguments import (
    cast_call,
    move_call,
    pack_call,
    scatter_call,
    unpack_call,
)
from allgrad.containers.nests import (
    Frame,
    Structure,
    flatten,
    map_tensors,
    register,
    split_tensors,
    tensors,
    unflatten,
)

__all__ = [
    "Frame",
    "Structure",
    "cast_call",
    "flatten",
    "map_tensors",
    "move_call",
    "pack_call",
    "register",
    "scatter_call",
    "split_tensors",
    "tensors",
    "unflatten",
    "unpack_call",
]
