"""Numbers as text."""

from __future__ import annotations

from pathlib import Path

__all__ = ["nbytes", "seconds", "short_site"]


def seconds(ns: float) -> str:
    """A time, with three digits: 1.23 ms."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if abs(ns) >= size:
            value = ns / size
            digits = 2 if value < 10 else 1 if value < 100 else 0
            return f"{value:,.{digits}f} {unit}"
    return f"{ns:.0f} ns"


def nbytes(count: float) -> str:
    """An amount of memory: 4.0 KiB."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count:.0f} B"


def short_site(site: str) -> str:
    """A source line as file and line alone."""
    return Path(site).name if ":" in site else site
