"""Import a library that may be missing; replace names of it for the length of a block."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["needs", "replaced"]


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Turn a failed import in the block into an error that names the extra to install."""
    try:
        yield
    except ImportError as error:
        raise ImportError(
            f"allgrad.integrations: {error}\nInstall the library: pip install 'allgrad[{extra}]'",
            name=error.name,
        ) from error


@contextmanager
def replaced(owner: object, **names: object) -> Iterator[None]:
    """Give a module or an object other values of these names, and its own ones after the block.

    Every thread of the process sees them. A name that the owner does not have raises.
    """
    for name in names:
        getattr(owner, name)
    own = {name: vars(owner)[name] for name in names if name in vars(owner)}
    try:
        for name, value in names.items():
            setattr(owner, name, value)
        yield
    finally:
        for name in names:
            if name in own:
                setattr(owner, name, own[name])
            elif name in vars(owner):  # the class has it; the object had none of its own
                delattr(owner, name)
