"""Numbers as text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["nbytes", "ranks_do", "ranks_text", "seconds", "short_site"]


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


def ranks_text(ranks: Iterable[int]) -> str:
    """``rank 3``, or ``ranks 0-3, 6``."""
    ranks = sorted(ranks)
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    spans = [str(low) if low == high else f"{low}-{high}" for low, high in runs]
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(spans) or 'none'}"


def ranks_do(ranks: Iterable[int], one: str, many: str) -> str:
    """The beginning of a sentence: ``Rank 3 is``, or ``Ranks 0-3, 6 are``."""
    ranks = list(ranks)
    return f"{ranks_text(ranks).capitalize()} {one if len(ranks) == 1 else many}"
