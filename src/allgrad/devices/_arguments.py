"""Checks of what the callers of :mod:`allgrad.devices.transfers` pass, and the error messages."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from allgrad._core.dtensor import is_dtensor
from allgrad._core.partition import even
from allgrad.errors import InputError, PieceMismatch, SizesError, TensorError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from allgrad.containers.nests import Frame

__all__ = [
    "Device",
    "at_least_vector",
    "check_device",
    "check_devices",
    "check_dim",
    "check_list",
    "check_sizes",
    "require_alike",
    "require_dense",
    "require_same_frame",
    "why_not_dense",
]

Device: TypeAlias = torch.device | str | int


def check_device(caller: str, given: Device) -> torch.device:
    """Return ``given`` as a device of this machine, with its index if its type has one."""
    try:
        number = _whole_number(given)
        device = torch.device(given) if number is None else torch.device("cuda", number)
    except (RuntimeError, TypeError) as error:
        raise InputError(
            f"{caller}: {given!r} is not a device.\nGive a torch.device, its name, or a CUDA index."
        ) from error
    if device.type in {"cpu", "meta"}:
        return torch.device(device.type)
    accelerator, count = torch.accelerator.current_accelerator(), torch.accelerator.device_count()
    kind = accelerator.type if accelerator else "none"
    if device.type != kind or (device.index or 0) >= count:
        available = ["cpu", *(f"{kind}:{index}" for index in range(count))]
        raise InputError(
            f"{caller}: there is no {device} here.\nThis machine has {', '.join(available)}."
        )
    return torch.empty(0, device=device).device  # "cuda" becomes "cuda:<current>"


def check_devices(caller: str, devices: Iterable[Device]) -> list[torch.device]:
    return [check_device(caller, device) for device in check_list(caller, "devices", devices)]


def check_list(caller: str, name: str, given: object) -> list[Any]:
    if isinstance(given, str | Tensor) or not isinstance(given, Iterable):
        raise InputError(
            f"{caller}: {name} is a single {type(given).__name__}.\nGive a list, with an entry for each device."
        )
    entries = list(given)
    if not entries:
        raise InputError(f"{caller}: {name} is empty.\nGive an entry for each device.")
    return entries


def why_not_dense(x: Tensor) -> str | None:
    """Why a tensor cannot be split, joined and packed; None if it can."""
    if is_dtensor(x):
        return "a DTensor"
    if x.is_nested:
        return "nested"
    if x.is_quantized:
        return "quantised"
    return None if x.layout == torch.strided else str(x.layout).removeprefix("torch.")


def _dense(caller: str, x: object, name: str) -> Tensor:
    if not isinstance(x, Tensor):
        raise TensorError(
            f"{caller}: {name} is {type(x).__name__}, not a tensor.\nGive tensors only."
        )
    if reason := why_not_dense(x):
        raise TensorError(
            f"{caller}: {name} is {reason}; only dense tensors can be copied.\nMake it dense before the call."
        )
    return x


def require_dense(caller: str, xs: Sequence[Tensor], frame: Frame, nest: str) -> None:
    if any(map(why_not_dense, xs)):  # making the names takes longer than the copies do
        for x, name in zip(xs, frame.names(nest), strict=True):
            _dense(caller, x, name)


def at_least_vector(caller: str, x: object, name: str) -> Tensor:
    tensor = _dense(caller, x, name)
    return tensor if tensor.dim() else tensor.reshape(1)


def _whole_number(value: object) -> int | None:
    """``value`` as an int if it is a whole number, else None. True and False are not numbers."""
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def check_dim(caller: str, x: Tensor, dim: object) -> int:
    axis = _whole_number(dim)
    if axis is None or not -x.dim() <= axis < x.dim():
        raise InputError(
            f"{caller}: dim={dim!r} is out of range for shape {tuple(x.shape)}.\n"
            f"Give a dim from {-x.dim()} to {x.dim() - 1}."
        )
    return axis % x.dim()


def check_sizes(
    devices: Sequence[torch.device], x: Tensor, dim: int, sizes: Sequence[int] | None
) -> tuple[int, ...]:
    """How many of the rows of ``x`` along ``dim`` each device gets."""
    length = x.shape[dim]
    if sizes is None:
        return even(length, len(devices))
    given = check_list("scatter", "sizes", sizes)
    checked = [
        size if (size := _whole_number(entry)) is not None and size >= 0 else None
        for entry in given
    ]
    known = [size for size in checked if size is not None]
    if len(known) == len(given) == len(devices) and sum(known) == length:
        return tuple(known)
    marks = {i: "not a whole number >= 0" for i, size in enumerate(checked) if size is None}
    marks |= dict.fromkeys(range(len(given), len(devices)), "no size")
    marks |= dict.fromkeys(range(len(devices), len(given)), "no device")
    raise SizesError(
        _table(
            f"scatter: give one size for each device; they must add up to {length}, not {sum(known)}.",
            [f"{device}, size {size}" for device, size in zip_longest(devices, given)],
            marks,
            f"Give {len(devices)} sizes that add up to x's length along dim {dim}.",
        )
    )


def require_alike(rule: str, xs: Sequence[Tensor], free_dim: int | None = None) -> None:
    """Raise unless all tensors have one dtype and one shape, except their length in ``free_dim``."""

    def kind(x: Tensor) -> tuple[object, ...]:
        return x.dtype, *(None if dim == free_dim else n for dim, n in enumerate(x.shape))

    most_common = Counter(map(kind, xs)).most_common(1)[0][0]
    marks = {}
    for i, x in enumerate(xs):
        if kind(x) == most_common:
            continue
        if x.dtype != most_common[0]:
            marks[i] = f"not {_short(most_common[0])}"
        elif x.dim() != len(most_common) - 1:
            marks[i] = f"{x.dim()} dimensions, not {len(most_common) - 1}"
        else:
            differing = [
                d for d, n in enumerate(most_common[1:]) if n is not None and n != x.shape[d]
            ]
            marks[i] = f"differs in dim {', '.join(map(str, differing))}"
    if marks:
        rows = [f"{x.device}, {tuple(x.shape)} {_short(x.dtype)}" for x in xs]
        raise PieceMismatch(
            _table(rule, rows, marks, "Give all of them one dtype and shape before the call.")
        )


def require_same_frame(frames: Sequence[Frame]) -> Frame:
    marks = {i: "differs from 0" for i, frame in enumerate(frames) if frame != frames[0]}
    if marks:
        rows = [str(frame) for frame in frames]
        rule = "reduce_add: all groups must have the same structure."
        advice = "Give each device the same tensors in the same containers."
        raise PieceMismatch(_table(rule, rows, marks, advice))
    return frames[0]


def _table(rule: str, rows: Sequence[str], marks: Mapping[int, str], advice: str) -> str:
    """An error message: the rule, a row for each device with marks, what to do."""
    width = max(map(len, rows))
    lines = [
        f"  {i}: {row:<{width}}   <- {marks[i]}" if i in marks else f"  {i}: {row}"
        for i, row in enumerate(rows)
    ]
    return "\n".join([rule, *lines, advice])


def _short(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
