"""What the caller and a worker say to each other, besides ``RankError``."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Call", "Enter", "Entered", "Finished"]


@dataclass(frozen=True, slots=True)
class Enter:
    """Leave the world you are in; meet the others of a new one under ``name``."""

    rank: int
    world: int
    backend: str
    port: int
    name: str


@dataclass(frozen=True, slots=True)
class Entered:
    """The worker is up, or its world has started."""


@dataclass(frozen=True, slots=True)
class Call:
    """Run a packed ``(function, args)``, with the caller's import path and directory."""

    packed: bytes
    path: list[str]
    directory: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The packed result, whether the world is as it was, and how many calls it carried."""

    packed: bytes
    untouched: bool
    calls: int
