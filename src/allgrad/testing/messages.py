"""The messages between the caller and a worker, besides ``RankError``."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Call", "Enter", "Entered", "Finished"]


@dataclass(frozen=True, slots=True)
class Enter:
    """Leave the current world and join a new one, called ``name``."""

    rank: int
    world: int
    backend: str
    address: str
    port: int
    name: str


@dataclass(frozen=True, slots=True)
class Entered:
    """The worker has started, or its world has."""


@dataclass(frozen=True, slots=True)
class Call:
    """Run a pickled ``(function, args, witness of main)`` with the caller's import path and directory."""

    pickled: bytes
    path: list[str]
    directory: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The pickled result; whether the world is unchanged, and the number of its calls so far."""

    pickled: bytes
    untouched: bool
    calls: int
