"""Free the memory of a tensor and allocate it again, while the tensor object stays."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from allgrad.errors import InputError, TensorError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["free_storage", "is_allocated", "restore_storage"]


def is_allocated(t: Tensor) -> bool:
    """Tell whether the tensor has memory; an empty or meta tensor has none."""
    return t.untyped_storage().data_ptr() != 0


def free_storage(t: Tensor) -> bool:
    """Free the memory of the tensor; shape, strides and dtype stay. Tell whether there was any.

        t = zeros(4, 8)   --->   t.shape is (4, 8), no memory   --restore_storage-->   new memory

    The tensor must use all of its storage: a tensor that uses only a part raises, since other
    tensors may use the rest. Views of the whole tensor lose their memory too, and get it back
    together with the tensor.
    """
    _require_memory("free_storage", t)
    storage = t.untyped_storage()
    if storage.size() == 0:
        return False
    if t.storage_offset() != 0 or storage.size() != t.numel() * t.element_size():
        raise TensorError(
            "free_storage: the tensor uses only a part of its storage, or elements of it twice.\n"
            f"  tensor:  {tuple(t.shape)}, {t.numel() * t.element_size()} bytes "
            f"from element {t.storage_offset()}\n"
            f"  storage: {storage.size()} bytes\n"
            "Free the tensor that uses all of it, or clone this one first."
        )
    _require_resizable("free_storage", t)
    storage.resize_(0)
    return True


def restore_storage(t: Tensor, size: int | Sequence[int] | None = None) -> bool:
    """Allocate memory for the tensor again, with undefined values. Tell whether there was none.

    ``size`` is a number of elements or a shape; by default, what the tensor needs. Existing memory
    of that size is left as it is.
    """
    _require_memory("restore_storage", t)
    needed = _elements_needed(t)
    wanted = needed if size is None else _numel(size)
    storage = t.untyped_storage()
    if wanted < needed:
        raise InputError(
            f"restore_storage: {wanted} elements are too few for shape {tuple(t.shape)} "
            f"from element {t.storage_offset()}.\nGive at least {needed}."
        )
    if storage.size() == wanted * t.element_size():
        return False
    if storage.size() != 0:
        raise TensorError(
            "restore_storage: the tensor has memory of another size.\n"
            f"  has:   {storage.size()} bytes\n"
            f"  asked: {wanted * t.element_size()} bytes\n"
            "Call free_storage first, or ask for the size it has."
        )
    _require_resizable("restore_storage", t)
    storage.resize_(wanted * t.element_size())
    return True


def _numel(size: int | Sequence[int]) -> int:
    lengths = [size] if isinstance(size, int) else list(size)
    count = 1
    for length in lengths:
        if length < 0:
            raise InputError(f"restore_storage: size={size} is negative.\nGive a shape.")
        count *= length
    return count


def _elements_needed(t: Tensor) -> int:
    """The index of the last element in the storage, plus one."""
    if t.numel() == 0:
        return 0
    steps = zip(t.shape, t.stride(), strict=True)
    return 1 + int(t.storage_offset()) + sum((length - 1) * stride for length, stride in steps)


def _require_memory(caller: str, t: object) -> None:
    if not isinstance(t, Tensor):
        raise TensorError(f"{caller}: {type(t).__name__} is not a tensor.\nGive a tensor.")
    if t.is_meta or hasattr(t, "__tensor_flatten__"):
        kind = "on the meta device" if t.is_meta else f"a {type(t).__name__}"
        raise TensorError(
            f"{caller}: the tensor is {kind}, without memory of its own.\nGive a plain tensor."
        )


def _require_resizable(caller: str, t: Tensor) -> None:
    if not t.untyped_storage().resizable():
        raise TensorError(
            f"{caller}: the memory of the tensor is not torch's (NumPy, a file, another process).\n"
            "Clone the tensor first."
        )
