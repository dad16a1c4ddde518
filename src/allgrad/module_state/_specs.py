"""The spec of an entry: kind, dtype, shape, piece of a DTensor, device, hash of the value."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sized
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from allgrad._core.dtensor import is_dtensor
from allgrad._core.partition import as_bytes, real_memory
from allgrad._wire.codec import DTYPES, dtype_name
from allgrad.module_state._entries import is_numpy_number, tensors_and_others
from allgrad.module_state.storage import is_allocated

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from allgrad.module_state._entries import Entry

__all__ = [
    "EntrySpec",
    "all_plain",
    "device_names",
    "entry_spec",
    "local_piece",
    "spec_summary",
    "why_unreadable",
]

_PLAIN = frozenset({Tensor, torch.nn.Parameter, torch.nn.Buffer})
_DTYPES = frozenset(DTYPES)


class EntrySpec(NamedTuple):
    """What a rank tells the others about an entry; equal on ranks that hold the same."""

    kind: str
    dtype: str = ""
    shape: str = ""
    piece: str = ""
    tied: str = ""
    device: str = ""
    value: str = ""

    def __str__(self) -> str:
        value = self.value[:13] if self.value.startswith("#") else self.value
        shown = (self.shape, self.dtype, self.piece, self.tied, self.device, value)
        kind = "" if self.kind in {"parameter", "buffer", "tensor", "setting"} else self.kind
        return " ".join(word for word in (kind, *shown) if word) or self.kind


def entry_spec(entry: Entry, *, device: str = "", values: bool = False) -> EntrySpec:
    """Describe what this rank holds; with ``values``, include a hash of its bits."""
    value = entry.value
    if entry.kind == "setting":
        # np.float64 is a Python float; other numbers of NumPy cannot hold every Python number.
        is_narrow = is_numpy_number(value) and not isinstance(value, float)
        plain = value.item() if is_narrow else value
        dtype = value.dtype.name if is_narrow else ""
        return EntrySpec("setting", dtype, value=json.dumps(plain) if values else "")
    if entry.kind == "object":
        length = f"of length {len(value)}" if isinstance(value, Sized) else ""
        return EntrySpec("object", type(value).__qualname__, length)
    tied = f"tied to {entry.tied}" if entry.tied else ""
    if is_lazy(value):
        return EntrySpec(entry.kind, dtype_name(value.dtype), "uninitialised", "", tied, device)
    shape, piece = str(tuple(value.shape)), _piece(value)
    hashed = _value_hash(value) if values and not tied else ""
    return EntrySpec(entry.kind, dtype_name(value.dtype), shape, piece, tied, device, hashed)


def why_unreadable(x: Tensor, *, writing: bool) -> str | None:
    """Why the bytes of a tensor cannot be read (or, with ``writing``, written); None if they can."""
    if is_lazy(x):
        return "not initialised yet"
    if x.is_meta:
        return "on the meta device, without values"
    if x.is_nested or x.layout != torch.strided:
        return "not dense"
    if x.is_quantized or x.dtype not in _DTYPES:
        return "of a dtype that cannot be read as bytes"
    if hasattr(x, "__tensor_flatten__") and not is_dtensor(x):
        return f"made of other tensors ({type(x).__name__})"
    if not _has_memory(x):
        return "without memory: it was freed, or the values are kept elsewhere"
    if writing and any(s == 0 and n > 1 for s, n in zip(x.stride(), x.shape, strict=True)):
        return "expanded: its elements share memory"
    return None


def all_plain(tensors: Sequence[Tensor]) -> bool:
    """Fast check that every tensor can be read and written: plain, dense, contiguous, with values."""
    if not _PLAIN.issuperset(map(type, tensors)):
        return False
    found = set(map(attrgetter("layout", "dtype", "is_nested", "is_meta"), tensors))
    plain = {(torch.strided, dtype, False, False) for dtype in _DTYPES}
    if not found <= plain or not all(map(Tensor.is_contiguous, tensors)):
        return False
    return all(x.numel() == 0 or is_allocated(x) for x in tensors)


def spec_summary(held: Sequence[Entry]) -> str:
    """A text to be hashed: the specs of all entries without values, faster than one by one.

    Ranks have the same summary if and only if they have the same specs, values aside.
    """
    tensors, others = tensors_and_others(held)
    shapes = list(map(attrgetter("value.dtype", "value.shape", "value.device"), tensors))
    numbers = {shape: number for number, shape in enumerate(dict.fromkeys(shapes))}
    devices = device_names(device for _, _, device in numbers)
    columns = (
        [entry.name for entry in tensors],
        [entry.kind for entry in tensors],
        [entry.tied for entry in tensors],
        [numbers[shape] for shape in shapes],
        [(dtype_name(dtype), tuple(shape), devices[device]) for dtype, shape, device in numbers],
        [(e.name, p) for e in tensors if type(e.value) not in _PLAIN and (p := _piece(e.value))],
        [(entry.name, *entry_spec(entry)) for entry in others],
    )
    return "\n".join(map(repr, columns))


def device_names(devices: Iterable[torch.device]) -> dict[torch.device, str]:
    """Name devices by type and by order of first use.

    Ranks may use devices with different indices, but must place the tensors on them in the same way.
    """
    distinct = enumerate(dict.fromkeys(devices))
    return {
        device: f"{device.type} (device {order})" if order else device.type
        for order, device in distinct
    }


def local_piece(x: Tensor) -> Tensor:
    """The plain tensor with this rank's part of ``x``, in the same memory."""
    if type(x) in _PLAIN:
        return x
    if is_dtensor(x):
        piece: Tensor = x.to_local()  # type: ignore[attr-defined]
        return piece
    return x.detach().as_subclass(Tensor)


@torch.no_grad()
def _value_hash(x: Tensor) -> str:
    if x.is_meta:
        return "on meta"
    hashed: Any = as_bytes(real_memory(local_piece(x))).cpu().numpy()
    return "#" + hashlib.blake2b(hashed, digest_size=16).hexdigest()


def _has_memory(x: Tensor) -> bool:
    if is_dtensor(x):
        with torch.no_grad():  # otherwise to_local does not wait for a piece that is on its way
            x = local_piece(x)
    try:
        return x.numel() == 0 or is_allocated(x)
    except RuntimeError:  # a wrapper: its storage has a size, and no address
        return False


def _piece(x: Any) -> str:
    """Which piece of a DTensor this rank holds, without the mesh axes that replicate it.

    Equal on ranks that hold the same piece, whatever their meshes.
    """
    if not is_dtensor(x):
        return ""
    coordinate = x.device_mesh.get_coordinate()
    if coordinate is None:
        return "outside its mesh"
    pieces = [
        f"{placement} piece {at} of {length}"
        for placement, at, length in zip(x.placements, coordinate, x.device_mesh.shape, strict=True)
        if not placement.is_replicate()
    ]
    return ", ".join(pieces) or "replicated"
