"""What can be said of an entry without sending it: kind, dtype, shape, piece, a hash of its value."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sized
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from allgrad._wire.handshake import DTYPES
from allgrad.module_state._entries import tensors_and_others

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from allgrad.module_state._entries import Entry

__all__ = [
    "Facts",
    "all_usual",
    "as_bytes",
    "device_words",
    "facts",
    "hindrance",
    "local_piece",
    "outline",
]

_PLAIN = frozenset({Tensor, torch.nn.Parameter, torch.nn.Buffer})
_DTYPE_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in DTYPES}


class Facts(NamedTuple):
    """What one rank says of an entry, in words; ranks that hold the same say the same."""

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


def facts(entry: Entry, *, device: str = "", values: bool = False) -> Facts:
    """Put into words what this rank holds, with a hash of its bits if ``values`` are asked for."""
    held = entry.value
    if entry.kind == "setting":
        return Facts("setting", value=json.dumps(held) if values else "")
    if entry.kind == "object":
        length = f"of length {len(held)}" if isinstance(held, Sized) else ""
        return Facts("object", type(held).__qualname__, length)
    tied = f"tied to {entry.tied}" if entry.tied else ""
    if is_lazy(held):
        return Facts(entry.kind, _name(held.dtype), "uninitialised", "", tied, device)
    value = _fingerprint(held) if values and not tied else ""
    shape = str(tuple(held.shape))
    return Facts(entry.kind, _name(held.dtype), shape, _piece(held), tied, device, value)


def hindrance(x: Tensor, *, writing: bool) -> str | None:
    """Say what keeps a tensor's bytes from being read here, and written if that is meant."""
    if is_lazy(x):
        return "not initialised yet"
    if x.is_meta:
        return "on the meta device, without values"
    if x.is_nested or x.layout != torch.strided:
        return "not dense"
    if x.is_quantized or x.dtype not in _DTYPE_NAMES:
        return "of a dtype that cannot be read as bytes"
    if hasattr(x, "__tensor_flatten__") and not _is_dtensor(x):
        return f"made of other tensors ({type(x).__name__})"
    if writing and any(s == 0 and n > 1 for s, n in zip(x.stride(), x.shape, strict=True)):
        return "expanded: its elements share memory"
    return None


def all_usual(tensors: Sequence[Tensor]) -> bool:
    """Tell quickly that nothing hinders any of them: plain, dense, contiguous, with values."""
    if not _PLAIN.issuperset(map(type, tensors)):
        return False
    kinds = set(map(attrgetter("layout", "dtype", "is_nested", "is_meta"), tensors))
    usual = {(torch.strided, dtype, False, False) for dtype in _DTYPE_NAMES}
    return kinds <= usual and all(map(Tensor.is_contiguous, tensors))


def outline(held: Sequence[Entry]) -> str:
    """The facts of all entries but their values, quickly and for hashing only.

    Ranks have the same outline exactly when they have the same facts, values aside.
    """
    tensors, others = tensors_and_others(held)
    looks = list(map(attrgetter("value.dtype", "value.shape", "value.device"), tensors))
    turns = {look: turn for turn, look in enumerate(dict.fromkeys(looks))}
    devices = device_words(device for _, _, device in turns)
    columns = (
        [entry.name for entry in tensors],
        [entry.kind for entry in tensors],
        [entry.tied for entry in tensors],
        [turns[look] for look in looks],
        [(_name(dtype), tuple(shape), devices[device]) for dtype, shape, device in turns],
        [(e.name, p) for e in tensors if type(e.value) not in _PLAIN and (p := _piece(e.value))],
        [(entry.name, *facts(entry)) for entry in others],
    )
    return "\n".join(map(repr, columns))


def device_words(devices: Iterable[torch.device]) -> dict[torch.device, str]:
    """Name devices by their kind and by their turn.

    Ranks may use devices of different numbers, but must share tensors out over them alike.
    """
    seen = enumerate(dict.fromkeys(devices))
    return {device: f"{device.type}{f' (device {turn})' if turn else ''}" for turn, device in seen}


def local_piece(x: Tensor) -> Tensor:
    """The plain tensor that holds this rank's bytes, in the same memory."""
    if type(x) in _PLAIN:
        return x
    if _is_dtensor(x):
        piece: Tensor = x.to_local()  # type: ignore[attr-defined]
        return piece
    return x.detach().as_subclass(Tensor)


def as_bytes(x: Tensor) -> Tensor:
    """A tensor's bytes in the order of its elements; a view of its memory where that is possible."""
    return x.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


@torch.no_grad()
def _fingerprint(x: Tensor) -> str:
    if x.is_meta:
        return "on meta"
    hashed: Any = as_bytes(local_piece(x)).cpu().numpy()
    return "#" + hashlib.blake2b(hashed, digest_size=16).hexdigest()


def _is_dtensor(x: Tensor) -> bool:
    return hasattr(x, "device_mesh") and hasattr(x, "placements")


def _piece(x: Any) -> str:
    """Which piece of a DTensor this rank holds: nothing to say of the axes that replicate it.

    Ranks that say the same hold the same piece, whichever meshes they hold it on.
    """
    if not _is_dtensor(x):
        return ""
    coordinate = x.device_mesh.get_coordinate()
    if coordinate is None:
        return "outside its mesh"
    words = [
        f"{placement} piece {at} of {length}"
        for placement, at, length in zip(x.placements, coordinate, x.device_mesh.shape, strict=True)
        if not placement.is_replicate()
    ]
    return ", ".join(words) or "replicated"


def _name(dtype: torch.dtype) -> str:
    return _DTYPE_NAMES.get(dtype) or str(dtype).removeprefix("torch.")
