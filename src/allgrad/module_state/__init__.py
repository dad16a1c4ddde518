"""The state of a module or an optimizer: sync, compare, verify; prefixes; storage.

Imports ``collectives``, ``_autograd``, ``_wire``, ``containers``, ``_core`` and ``errors``.
"""

from allgrad.module_state._compare import compare, verify
from allgrad.module_state._differences import Difference, StateMismatch
from allgrad.module_state._entries import State
from allgrad.module_state._sync import sync
from allgrad.module_state.prefixes import rename_prefix
from allgrad.module_state.storage import free_storage, is_allocated, restore_storage

__all__ = [
    "Difference",
    "State",
    "StateMismatch",
    "compare",
    "free_storage",
    "is_allocated",
    "rename_prefix",
    "restore_storage",
    "sync",
    "verify",
]
