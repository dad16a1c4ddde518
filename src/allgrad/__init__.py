"""Collectives with exact gradients for PyTorch."""

from typing import TYPE_CHECKING

from allgrad import errors, types
from allgrad._autograd.lockstep import lockstep
from allgrad._core.version import __version__
from allgrad._wire.consistency import checked
from allgrad._wire.deadline import deadline
from allgrad._wire.recording import recorded
from allgrad.collectives.all_gather import all_gather, gather_sizes, reduce_scatter, split
from allgrad.collectives.all_reduce import all_reduce, share
from allgrad.collectives.all_to_all import all_to_all
from allgrad.collectives.broadcast import broadcast, reduce
from allgrad.collectives.gather import gather, scatter
from allgrad.collectives.join import join
from allgrad.collectives.permute import permute, shift
from allgrad.collectives.scan import scan

if TYPE_CHECKING:
    from allgrad import compat as compat
    from allgrad import containers as containers
    from allgrad import devices as devices
    from allgrad import integrations as integrations
    from allgrad import losses as losses
    from allgrad import module_state as module_state
    from allgrad import nn as nn
    from allgrad import testing as testing
    from allgrad import wrappers as wrappers
else:
    # Imported when allgrad.NAME is first asked for: most programs need few of them.
    _PACKAGES = "compat containers devices integrations losses module_state nn testing wrappers"

    def __getattr__(name):
        if name not in _PACKAGES.split():
            raise AttributeError(f"module 'allgrad' has no attribute {name!r}")
        from importlib import import_module

        return import_module(f"allgrad.{name}")


__all__ = [
    "__version__",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "checked",
    "deadline",
    "errors",
    "gather",
    "gather_sizes",
    "join",
    "lockstep",
    "permute",
    "recorded",
    "reduce",
    "reduce_scatter",
    "scan",
    "scatter",
    "share",
    "shift",
    "split",
    "types",
]
