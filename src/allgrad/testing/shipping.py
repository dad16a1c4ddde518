"""Functions, arguments and results on their way between the caller and the ranks.

``cloudpickle`` comes with ``allgrad[testing]`` and is imported when first used: pytest loads this
package through its plugin, also where nobody asks for ranks.
"""

from __future__ import annotations

import io
import pickle
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from allgrad.errors import AllgradError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import ModuleType

__all__ = ["CannotShip", "by_value", "load", "ship"]


class CannotShip(AllgradError):
    """Something that cannot travel to the ranks, or back from them."""


def ship(value: object, what: str, *, detach: bool = False) -> bytes:
    """Pack ``value``, functions of ``__main__``, lambdas and closures included.

    With ``detach``, computed tensors leave their graphs behind; a leaf keeps asking for its gradient.
    """
    file = io.BytesIO()
    pickler = _picklers()[detach](file)
    try:
        pickler.dump(value)
    except Exception as error:
        raise CannotShip(f"{what} cannot be pickled: {error}") from error
    return file.getvalue()


def load(packed: bytes, what: str) -> Any:
    """Unpack what ``ship`` packed."""
    try:
        return pickle.loads(packed)  # noqa: S301 - from a process this one started, or was started by
    except Exception as error:
        raise CannotShip(f"{what} cannot be unpickled: {error}") from error


@contextmanager
def by_value(modules: Iterable[ModuleType]) -> Iterator[None]:
    """Ship what these modules define as it is here, for ranks that cannot import it by name."""
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
    plain: type[Any] = _cloudpickle().Pickler

    class DetachingPickler(plain):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, torch.Tensor) and obj.grad_fn is not None:
                return obj.detach().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            return super().reducer_override(obj)

    return plain, DetachingPickler
