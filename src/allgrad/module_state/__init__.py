"""What a module or an optimizer holds: given to every rank, compared, renamed, freed."""

from allgrad.module_state.comparing import compare, verify
from allgrad.module_state.differences import Difference, StateMismatch
from allgrad.module_state.entries import State
from allgrad.module_state.prefixes import rename_prefix
from allgrad.module_state.storage import free_storage, is_allocated, restore_storage
from allgrad.module_state.syncing import sync

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
