"""What is computed of plain numbers, below every transform of torch.func.

A message of counts or lengths is the same for the whole batch of a vmap. Inside the transform a gather
would give it a batch, and nobody could read it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from allgrad._core.torch_internals import (
    VmapInterpreter,
    current_interpreter,
    functorch_active,
    transform_names,
)

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["batch_sizes", "below_transforms", "in_vmap"]

T = TypeVar("T")


def below_transforms(function: Callable[..., T], *args: Any) -> T:
    """Call it as if no transform were active; no tensor of one may be used."""
    if not functorch_active():
        return function(*args)
    with current_interpreter().lower():
        return below_transforms(function, *args)


def in_vmap() -> bool:
    """Tell whether tensors may have a batch, whose values cannot be read."""
    return functorch_active() and "Vmap" in transform_names()


def batch_sizes() -> tuple[int, ...]:
    """The batch sizes of the active vmaps, the outermost first; all ranks must have the same."""
    if not functorch_active():
        return ()
    interpreter = current_interpreter()
    own = (interpreter.batch_size(),) if isinstance(interpreter, VmapInterpreter) else ()
    with interpreter.lower():
        return (*batch_sizes(), *own)
