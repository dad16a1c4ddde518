"""Serialization of functions, arguments and results between the caller and the ranks.

``cloudpickle`` is part of ``allgrad[testing]`` and is imported when first used: pytest loads this
package through its plugin even if no test uses ranks.
"""

from __future__ import annotations

import io
import pickle
import sys
from contextlib import contextmanager
from functools import cache
from operator import attrgetter
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from allgrad.errors import AllgradError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import ModuleType

__all__ = ["CannotShip", "by_value", "deserialize", "fill_main", "serialize", "witness_of_main"]


class CannotShip(AllgradError):
    """Something cannot be pickled, to be sent to the ranks or back from them."""


def serialize(value: object, what: str, *, detach: bool = False) -> bytes:
    """Pickle ``value``, including functions of ``__main__``, lambdas and closures.

    With ``detach``, computed tensors lose their autograd graph; a leaf still requires grad.
    """
    file = io.BytesIO()
    pickler = _picklers()[detach](file)
    try:
        pickler.dump(value)
    except Exception as error:
        raise CannotShip(f"{what} cannot be pickled: {error}") from error
    return file.getvalue()


def deserialize(pickled: bytes, what: str) -> Any:
    """Undo :func:`serialize`."""
    try:
        return pickle.loads(pickled)  # noqa: S301 - from a process this one started, or was started by
    except Exception as error:
        raise CannotShip(f"{what} cannot be unpickled: {error}") from error


def witness_of_main() -> FunctionType:
    """A function that does nothing. Functions of ``__main__`` that are pickled with it share its globals."""
    return FunctionType((lambda: None).__code__, vars(sys.modules["__main__"]))


def fill_main(witness: FunctionType) -> None:
    """Give ``__main__`` of this process what functions of the caller's ``__main__`` use.

    TorchDynamo looks for their globals in the module of their name
    (test_a_module_of_main_can_be_compiled_inside_another).
    """
    found = witness.__globals__.items()
    vars(sys.modules["__main__"]).update({k: x for k, x in found if not k.startswith("__")})


@contextmanager
def by_value(modules: Iterable[ModuleType]) -> Iterator[None]:
    """Pickle the functions of these modules by value, for ranks that cannot import them."""
    cloudpickle = _cloudpickle()
    already = cloudpickle.list_registry_pickle_by_value()
    new = [module for module in modules if module.__name__ not in already]
    for module in new:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in new:
            cloudpickle.unregister_pickle_by_value(module)


@cache
def _cloudpickle() -> Any:
    try:
        import cloudpickle  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise CannotShip("Running ranks needs cloudpickle: install allgrad[testing].") from error
    return cloudpickle


@cache
def _picklers() -> tuple[type[Any], type[Any]]:
    base: type[Any] = _cloudpickle().Pickler
    ops, namespace = type(torch.ops), type(torch.ops.aten)
    op = type(torch.ops.aten.mm), type(torch.ops.aten.mm.default)

    class Pickler(base):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            # A function that names an op holds these, which have no reduction of their own
            # (test_a_function_that_names_an_op).
            if isinstance(obj, ops):
                return getattr, (torch, "ops")
            if isinstance(obj, namespace):
                return getattr, (torch.ops, obj.name)
            if isinstance(obj, op):
                return attrgetter(str(obj)), (torch.ops,)
            return super().reducer_override(obj)

    class DetachingPickler(Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, torch.Tensor) and obj.grad_fn is not None:
                return obj.detach().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            return super().reducer_override(obj)

    return Pickler, DetachingPickler
