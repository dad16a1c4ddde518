"""``rename_prefix``: the names of a state dict, moved under another name."""

from __future__ import annotations

from typing import Any

from allgrad.errors import InputError

__all__ = ["rename_prefix"]


def rename_prefix(state_dict: dict[str, Any], old: str, new: str) -> None:
    """Give every name that begins with ``old`` the beginning ``new`` instead, in place.

    {"layer.w": a, "head.w": b}, "layer.", "module.layer."   --->   {"module.layer.w": a, "head.w": b}

    Names keep their places in the order; values are the same objects. The versions that torch
    keeps in ``state_dict._metadata`` move along, so ``load_state_dict`` still finds them. Two
    entries that would end under one name raise, and nothing is changed.
    """
    if old == new:
        raise InputError(
            f"rename_prefix: old and new are both {old!r}.\nGive two prefixes that are distinct."
        )
    renamed = {key: _renamed(key, old, new) for key in state_dict}
    if len(set(renamed.values())) < len(renamed):
        _raise_collision(renamed)
    values = {renamed[key]: value for key, value in state_dict.items()}
    state_dict.clear()
    state_dict.update(values)
    metadata = getattr(state_dict, "_metadata", None)
    if isinstance(metadata, dict):
        _rename_modules(metadata, old, new)


def _renamed(key: str, old: str, new: str) -> str:
    if not isinstance(key, str) or not key.startswith(old):
        return key
    return new + key[len(old) :]


def _rename_modules(metadata: dict[str, Any], old: str, new: str) -> None:
    """Rename modules: what is "layer" here is "layer." in the names of its entries."""
    stayed, moved = {}, {}
    for module, value in metadata.items():
        prefix = f"{module}." if module else ""
        if prefix.startswith(old):
            moved[_renamed(prefix, old, new).removesuffix(".")] = value
        else:
            stayed[module] = value
    metadata.clear()
    # The module that moves to a wrapper's place replaces it.
    metadata.update({**stayed, **moved})


def _raise_collision(renamed: dict[str, str]) -> None:
    first: dict[str, str] = {}
    for key, name in renamed.items():
        other = first.setdefault(name, key)
        if other != key:
            raise InputError(
                f"rename_prefix: {other!r} and {key!r} would both become {name!r}.\n"
                "Rename or remove one of them first."
            )
