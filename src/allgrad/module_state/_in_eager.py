"""Calls that run in eager code between two graphs: they compare texts on the host, which no graph can."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["in_eager"]

P = ParamSpec("P")
T = TypeVar("T")


def in_eager(function: Callable[P, T]) -> Callable[P, T]:
    """Leave the graph for a call: ranks whose graphs broke in different places inside would wait for each other."""

    @wraps(function)
    def run(*args: P.args, **options: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            from allgrad._autograd import graph_breaks

            done: T = graph_breaks.run_on_the_host(function, *args, **options)
            return done
        return function(*args, **options)

    return run
