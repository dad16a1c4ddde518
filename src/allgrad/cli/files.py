"""Files that a command writes: a bad name is refused before the work, not after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["require_writable"]


def require_writable(path: Path | None, option: str) -> None:
    """Refuse a file of ``option`` that cannot be written there."""
    if path is None:
        return
    if not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"There is no directory {path.parent}.", param_hint=option)
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a directory.\nName a file.", param_hint=option)
    is_new = not path.exists()
    if not is_new and not path.is_file():
        return  # a pipe: whoever reads it would see its end
    try:
        path.open("ab").close()
    except OSError as error:
        text = f"{path} cannot be written: {error.strerror}."
        raise typer.BadParameter(text, param_hint=option) from None
    if is_new:
        path.unlink()
