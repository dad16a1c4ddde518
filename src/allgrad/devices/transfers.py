"""One process, several devices: the pairs of the collectives, without a wire.

Everything here is differentiable to any order, on the CPU as on accelerators, with any mix of
devices and with one device named several times. A result requires grad when its input does.

Results are new, contiguous tensors. From the host to CUDA they travel on a stream of their own,
beside the work under way, and the device's current stream waits for them. Copies from pinned
memory may still be reading their source when a call returns: do not write to it before the device
has caught up.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from allgrad._core.partition import even
from allgrad.containers.nests import map_tensors, split_tensors
from allgrad.devices._pairs import apply, copy_pair, finish_host_copies, join_pair
from allgrad.errors import InputError, PieceMismatch, ReductionError, SizesError, TensorError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from allgrad.containers.nests import Frame

__all__ = ["Device", "broadcast", "gather", "reduce_add", "scatter", "to_device"]

Device: TypeAlias = torch.device | str | int
_Nest = TypeVar("_Nest")


def broadcast(tensors: _Nest, devices: Iterable[Device]) -> list[_Nest]:
    """Give every device a copy of a tensor, or of a nest of tensors.

        home   [ a ]     --->     device 0   [ a ]
                                  device 1   [ a ]
                                  device 2   [ a ]

    Gradient: ``reduce_add`` onto the device of each tensor.

        home   [ A0+A1+A2 ]  <--  device 0   [ A0 ]
                                  device 1   [ A1 ]
                                  device 2   [ A2 ]

    Cost: one copy for each device and each large tensor. Small tensors of one dtype travel together.
    """
    places = _places("broadcast", devices)
    found, frame = split_tensors(tensors)
    if not found and frame.structure.num_leaves:
        raise TensorError("broadcast: no tensor was given.\nGive a tensor or a nest of tensors.")
    _require_dense("broadcast", found, frame, "tensors")
    return [frame(row) for row in _copies(found, places)]


def reduce_add(groups: Iterable[_Nest], device: Device) -> _Nest:
    """Add up what several devices hold, tensor by tensor, onto ``device``; undoes ``broadcast``.

        device 0   [ a ]
        device 1   [ b ]     --->     device   [ a+b+c ]
        device 2   [ c ]

    Each group is one device's tensor, list or nest of tensors, all built alike.

    Gradient: ``broadcast`` to where each tensor was.

        device 0   [ A ]
        device 1   [ A ]     <---     device   [ A ]
        device 2   [ A ]

    Cost: one copy for each group and each large tensor. Small tensors of one dtype travel together.
    """
    place = _device("reduce_add", device)
    taken = [split_tensors(group) for group in _listed("reduce_add", "groups", groups)]
    frame = _same_frame([frame for _, frame in taken])
    rows = [xs for xs, _ in taken]
    for i, row in enumerate(rows):
        _require_dense("reduce_add", row, frame, f"groups[{i}]")
    columns = list(zip(*rows, strict=True))
    for j, column in enumerate(columns):
        if column[0].dtype == torch.bool:
            raise ReductionError(
                f"reduce_add: {frame.names('groups[i]')[j]} is bool, and a sum does not fit in bool.\n"
                "Add it as an integer, x.int()."
            )
        if len({(x.dtype, x.shape) for x in column}) > 1:
            name = frame.names("groups[i]")[j]
            _require_alike(f"reduce_add: {name} has one shape and one dtype everywhere.", column)
    sums: list[Any] = [None] * len(columns)
    for some in _by_need(columns):
        pair = copy_pair([place] * len(some), [[row[j].device for j in some] for row in rows])
        added = apply(pair.adjoint, [row[j] for row in rows for j in some])
        for j, total in zip(some, added, strict=True):
            sums[j] = total
    result: _Nest = frame(sums)
    return result


def scatter(
    x: Tensor, devices: Iterable[Device], *, sizes: Sequence[int] | None = None, dim: int = 0
) -> list[Tensor]:
    """Cut ``x`` along ``dim``, and give each device its piece.

        home   [ a a | b | c c c ]     --->     device 0   [ a a ]
                                                device 1   [ b ]
                                                device 2   [ c c c ]

    ``sizes=None`` cuts as evenly as possible, the first devices get one more. A tensor without
    dimensions counts as a vector of one.

    Gradient: ``gather`` to the device of ``x`` with the same sizes.

    Cost: one copy for each device.
    """
    places = _places("scatter", devices)
    x = _vector_at_least("scatter", x, "x")
    axis = _dim_from_front("scatter", x, dim)
    cut = _shares(places, x, axis, sizes)
    return apply(join_pair(x.device, places, cut, axis).adjoint, [x])


def gather(xs: Iterable[Tensor], device: Device, *, dim: int = 0) -> Tensor:
    """Join the devices' pieces along ``dim`` on one device.

        device 0   [ a a ]
        device 1   [ b ]         --->     device   [ a a | b | c c c ]
        device 2   [ c c c ]

    Pieces may differ in length along ``dim``; a piece without dimensions counts as a vector of one.

    Gradient: ``scatter`` to where each piece was, with the same sizes.

    Cost: one copy for each piece, straight into its place in the result.
    """
    place = _device("gather", device)
    given = _listed("gather", "xs", xs)
    pieces = [_vector_at_least("gather", x, f"xs[{i}]") for i, x in enumerate(given)]
    axis = _dim_from_front("gather", pieces[0], dim)
    _require_alike(f"gather: pieces may differ along dim {axis} only.", pieces, axis)
    sizes = [piece.shape[axis] for piece in pieces]
    (joined,) = apply(join_pair(place, [p.device for p in pieces], sizes, axis), pieces)
    return joined


def to_device(nest: _Nest, device: Device, *, non_blocking: bool = False) -> _Nest:
    """The nest with all its tensors on ``device``; a tensor already there is passed on itself.

    What is shared in the nest stays shared. ``non_blocking=True`` returns before copies from pinned
    memory are done.

    Gradient: moved back to where each tensor was.

    Cost: one copy for each large tensor. Small tensors of one dtype travel together.
    """
    place = _device("to_device", device)
    found: dict[int, Tensor] = {}
    map_tensors(lambda x: found.setdefault(id(x), x), nest)
    moved = {key: x.to(place) for key, x in found.items() if _obstacle(x)}
    keys = [key for key, x in found.items() if key not in moved and x.device != place]
    (copies,) = _copies([found[key] for key in keys], [place])
    moved.update(zip(keys, copies, strict=True))
    if not non_blocking:
        finish_host_copies(place)
    return map_tensors(lambda x: moved.get(id(x), x), nest)


def _by_need(columns: Sequence[Sequence[Tensor]]) -> list[list[int]]:
    """Which columns may go through autograd in one call, where all results are marked alike."""
    groups: dict[object, list[int]] = {}
    for j, column in enumerate(columns):
        differentiable = column[0].is_floating_point() or column[0].is_complex()
        need = any(x.requires_grad for x in column)
        groups.setdefault((differentiable, need), []).append(j)
    return list(groups.values())


def _copies(xs: Sequence[Tensor], places: Sequence[torch.device]) -> list[list[Tensor]]:
    """For each place a list of copies of ``xs``, differentiable."""
    rows: list[list[Any]] = [[None] * len(xs) for _ in places]
    for some in _by_need([[x] for x in xs]):
        pair = copy_pair([xs[j].device for j in some], [[place] * len(some) for place in places])
        copies = iter(apply(pair, [xs[j] for j in some]))
        for row in rows:
            for j in some:
                row[j] = next(copies)
    return rows


# What callers pass, checked.


def _device(op: str, given: Device) -> torch.device:
    """Let through a device of this machine, with its index where it has one."""
    try:
        number = _whole(given)
        device = torch.device(given) if number is None else torch.device("cuda", number)
    except (RuntimeError, TypeError) as error:
        raise InputError(
            f"{op}: {given!r} is not a device.\nGive a torch.device, its name, or a CUDA index."
        ) from error
    if device.type in {"cpu", "meta"}:
        return torch.device(device.type)
    found, count = torch.accelerator.current_accelerator(), torch.accelerator.device_count()
    kind = found.type if found else "none"
    if device.type != kind or (device.index or 0) >= count:
        there = ["cpu", *(f"{kind}:{index}" for index in range(count))]
        raise InputError(f"{op}: there is no {device} here.\nThis machine has {', '.join(there)}.")
    return torch.empty(0, device=device).device  # "cuda" alone becomes the current one, by index


def _places(op: str, devices: Iterable[Device]) -> list[torch.device]:
    return [_device(op, device) for device in _listed(op, "devices", devices)]


def _listed(op: str, name: str, given: object) -> list[Any]:
    if isinstance(given, str | Tensor) or not isinstance(given, Iterable):
        raise InputError(
            f"{op}: {name} is one {type(given).__name__}.\nGive a list, with an entry for each device."
        )
    entries = list(given)
    if not entries:
        raise InputError(f"{op}: {name} is empty.\nGive an entry for each device.")
    return entries


def _obstacle(x: Tensor) -> str | None:
    """What keeps a tensor from being cut, joined and packed, in a word."""
    if hasattr(x, "device_mesh"):
        return "a DTensor"
    if x.is_nested:
        return "nested"
    if x.is_quantized:
        return "quantised"
    return None if x.layout == torch.strided else str(x.layout).removeprefix("torch.")


def _dense(op: str, x: object, name: str) -> Tensor:
    if not isinstance(x, Tensor):
        raise TensorError(f"{op}: {name} is {type(x).__name__}, not a tensor.\nGive tensors only.")
    if obstacle := _obstacle(x):
        raise TensorError(
            f"{op}: {name} is {obstacle}; only dense tensors travel.\nMake it dense before the call."
        )
    return x


def _require_dense(op: str, xs: Sequence[Tensor], frame: Frame, nest: str) -> None:
    if any(map(_obstacle, xs)):  # names take longer than the copies do
        for x, name in zip(xs, frame.names(nest), strict=True):
            _dense(op, x, name)


def _vector_at_least(op: str, x: object, name: str) -> Tensor:
    tensor = _dense(op, x, name)
    return tensor if tensor.dim() else tensor.reshape(1)


def _whole(value: object) -> int | None:
    """A whole number as an int, and None for anything else; True and False are no numbers."""
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def _dim_from_front(op: str, x: Tensor, dim: object) -> int:
    axis = _whole(dim)
    if axis is None or not -x.dim() <= axis < x.dim():
        raise InputError(
            f"{op}: dim={dim!r} is out of range for shape {tuple(x.shape)}.\n"
            f"Give a dim from {-x.dim()} to {x.dim() - 1}."
        )
    return axis % x.dim()


def _shares(
    places: Sequence[torch.device], x: Tensor, dim: int, sizes: Sequence[int] | None
) -> tuple[int, ...]:
    """How the length of ``x`` along ``dim`` is cut for the devices."""
    length = x.shape[dim]
    if sizes is None:
        return even(length, len(places))
    given = _listed("scatter", "sizes", sizes)
    cut = [size if (size := _whole(entry)) is not None and size >= 0 else None for entry in given]
    known = [size for size in cut if size is not None]
    if len(known) == len(given) == len(places) and sum(known) == length:
        return tuple(known)
    marks = {i: "not a whole number from 0 up" for i, size in enumerate(cut) if size is None}
    marks |= dict.fromkeys(range(len(given), len(places)), "no size")
    marks |= dict.fromkeys(range(len(places), len(given)), "no device")
    raise SizesError(
        _table(
            f"scatter: sizes are one for each device, and add up to {length}, not {sum(known)}.",
            [f"{place}, size {size}" for place, size in zip_longest(places, given)],
            marks,
            f"Give {len(places)} sizes that add up to x's length along dim {dim}.",
        )
    )


def _require_alike(rule: str, xs: Sequence[Tensor], free_dim: int | None = None) -> None:
    """Raise unless all tensors agree in everything but their length in one dim."""

    def kind(x: Tensor) -> tuple[object, ...]:
        return x.dtype, *(None if dim == free_dim else n for dim, n in enumerate(x.shape))

    usual = Counter(map(kind, xs)).most_common(1)[0][0]
    marks = {}
    for i, x in enumerate(xs):
        if kind(x) == usual:
            continue
        if x.dtype != usual[0]:
            marks[i] = f"not {_short(usual[0])}"
        elif x.dim() != len(usual) - 1:
            marks[i] = f"{x.dim()} dimensions, not {len(usual) - 1}"
        else:
            differing = [d for d, n in enumerate(usual[1:]) if n is not None and n != x.shape[d]]
            marks[i] = f"differs in dim {', '.join(map(str, differing))}"
    if marks:
        rows = [f"{x.device}, {tuple(x.shape)} {_short(x.dtype)}" for x in xs]
        raise PieceMismatch(_table(rule, rows, marks, "Make them alike before the call."))


def _same_frame(frames: Sequence[Frame]) -> Frame:
    marks = {i: "differs from 0" for i, frame in enumerate(frames) if frame != frames[0]}
    if marks:
        rows = [str(frame) for frame in frames]
        rule = "reduce_add: all groups are built alike."
        advice = "Give each device the same tensors in the same containers."
        raise PieceMismatch(_table(rule, rows, marks, advice))
    return frames[0]


def _table(rule: str, rows: Sequence[str], marks: Mapping[int, str], advice: str) -> str:
    """Compose a message: the rule, what each device had with the odd ones marked, what to do."""
    width = max(map(len, rows))
    lines = [
        f"  {i}: {row:<{width}}   <- {marks[i]}" if i in marks else f"  {i}: {row}"
        for i, row in enumerate(rows)
    ]
    return "\n".join([rule, *lines, advice])


def _short(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
