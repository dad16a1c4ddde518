"""``rename_prefix``: change a prefix of the names in a state dict."""

from __future__ import annotations

from typing import Any

from allgrad.errors import InputError

__all__ = ["rename_prefix"]


def rename_prefix(state_dict: dict[str, Any], old: str, new: str) -> None:
    """Replace the prefix ``old`` by ``new`` in every name that has it, in place.

    {"layer.w": a, "head.w": b}, "layer.", "module.layer."   --->   {"module.layer.w": a, "head.w": b}

    The order of the names and the value objects do not change. The versions in torch's
    ``state_dict._metadata`` are renamed too, so that ``load_state_dict`` finds them. If two entries
    would get the same name, it raises and changes nothing.
    """
    if old == new:
        raise InputError(
            f"rename_prefix: old and new are both {old!r}.\nGive two different prefixes."
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
    """Rename modules: a module is "layer" here, and the prefix of its entries is "layer."."""
    stayed, moved = {}, {}
    for module, value in metadata.items():
        prefix = f"{module}." if module else ""
        if prefix.startswith(old):
            moved[_renamed(prefix, old, new).removesuffix(".")] = value
        else:
            stayed[module] = value
    metadata.clear()
    # A module that gets the name of its former wrapper replaces the entry of the wrapper.
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
