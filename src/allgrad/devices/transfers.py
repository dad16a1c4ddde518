"""One process, several devices: collectives between devices, without process groups.

Every function is differentiable to any order, on CPU and on accelerators. Devices of different
types may be mixed, and one device may be given several times. A result requires grad when its
input does.

Results are new, contiguous tensors. Copies from the host to CUDA run on a side stream, at the same
time as other work; the device's current stream waits for them. A copy from pinned memory may still
be reading its source when the call returns: do not write to the source before the device is
synchronized.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch

from allgrad.containers.nests import map_tensors, split_tensors
from allgrad.devices._adjoint_pairs import apply, copy_pair, join_pair
from allgrad.devices._arguments import (
    Device,
    at_least_vector,
    check_device,
    check_devices,
    check_dim,
    check_list,
    check_sizes,
    require_alike,
    require_dense,
    require_same_frame,
    why_not_dense,
)
from allgrad.devices._copies import wait_for_host_copies
from allgrad.errors import ReductionError, TensorError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

__all__ = ["Device", "broadcast", "gather", "reduce_add", "scatter", "to_device"]

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

    Cost: one copy for each device and each large tensor. Small tensors of one dtype are copied together.
    """
    targets = check_devices("broadcast", devices)
    leaves, frame = split_tensors(tensors)
    if not leaves and frame.structure.num_leaves:
        raise TensorError("broadcast: no tensor was given.\nGive a tensor or a nest of tensors.")
    require_dense("broadcast", leaves, frame, "tensors")
    return [frame(row) for row in _copies(leaves, targets)]


def reduce_add(groups: Iterable[_Nest], device: Device) -> _Nest:
    """Sum what several devices hold, tensor by tensor, on ``device``; the adjoint of ``broadcast``.

        device 0   [ a ]
        device 1   [ b ]     --->     device   [ a+b+c ]
        device 2   [ c ]

    Each group is the tensor, list or nest of tensors of one device; all have the same structure.

    Gradient: ``broadcast`` to the device of each tensor.

        device 0   [ A ]
        device 1   [ A ]     <---     device   [ A ]
        device 2   [ A ]

    Cost: one copy for each group and each large tensor. Small tensors of one dtype are copied together.
    """
    target = check_device("reduce_add", device)
    split = [split_tensors(group) for group in check_list("reduce_add", "groups", groups)]
    frame = require_same_frame([frame for _, frame in split])
    rows = [leaves for leaves, _ in split]
    for i, row in enumerate(rows):
        require_dense("reduce_add", row, frame, f"groups[{i}]")
    columns = list(zip(*rows, strict=True))
    for j, column in enumerate(columns):
        if column[0].dtype == torch.bool:
            raise ReductionError(
                f"reduce_add: {frame.names('groups[i]')[j]} is bool, and bool cannot hold a sum.\n"
                "Convert it to integers first: x.int()."
            )
        if len({(x.dtype, x.shape) for x in column}) > 1:
            name = frame.names("groups[i]")[j]
            require_alike(
                f"reduce_add: {name} must have one shape and one dtype in all groups.", column
            )
    sums: list[Any] = [None] * len(columns)
    for some in _by_requires_grad(columns):
        pair = copy_pair([target] * len(some), [[row[j].device for j in some] for row in rows])
        added = apply(pair.adjoint, [row[j] for row in rows for j in some])
        for j, total in zip(some, added, strict=True):
            sums[j] = total
    result: _Nest = frame(sums)
    return result


def scatter(
    x: Tensor, devices: Iterable[Device], *, sizes: Sequence[int] | None = None, dim: int = 0
) -> list[Tensor]:
    """Split ``x`` along ``dim``, and give each device its piece.

        home   [ a a | b | c c c ]     --->     device 0   [ a a ]
                                                device 1   [ b ]
                                                device 2   [ c c c ]

    ``sizes=None`` splits as evenly as possible: the first devices get one row more. A tensor
    without dimensions is treated as a vector of length 1.

    Gradient: ``gather`` to the device of ``x`` with the same sizes.

    Cost: one copy for each device.
    """
    targets = check_devices("scatter", devices)
    x = at_least_vector("scatter", x, "x")
    axis = check_dim("scatter", x, dim)
    lengths = check_sizes(targets, x, axis, sizes)
    return apply(join_pair(x.device, targets, lengths, axis).adjoint, [x])


def gather(xs: Iterable[Tensor], device: Device, *, dim: int = 0) -> Tensor:
    """Join the devices' pieces along ``dim`` on one device.

        device 0   [ a a ]
        device 1   [ b ]         --->     device   [ a a | b | c c c ]
        device 2   [ c c c ]

    Pieces may differ in length along ``dim``; one without dimensions is a vector of length 1.

    Gradient: ``scatter`` to the device of each piece, with the same sizes.

    Cost: one copy for each piece, directly into the result.
    """
    target = check_device("gather", device)
    given = check_list("gather", "xs", xs)
    pieces = [at_least_vector("gather", x, f"xs[{i}]") for i, x in enumerate(given)]
    axis = check_dim("gather", pieces[0], dim)
    require_alike(f"gather: pieces may differ along dim {axis} only.", pieces, axis)
    sizes = [piece.shape[axis] for piece in pieces]
    (joined,) = apply(join_pair(target, [p.device for p in pieces], sizes, axis), pieces)
    return joined


def to_device(nest: _Nest, device: Device, *, non_blocking: bool = False) -> _Nest:
    """The nest with all its tensors on ``device``; a tensor that is already there is not copied.

    A tensor that is in the nest twice is one tensor afterwards. ``non_blocking=True`` returns
    before copies from pinned memory are complete.

    Gradient: copied back to the device of each tensor.

    Cost: one copy for each large tensor. Small tensors of one dtype are copied together.
    """
    target = check_device("to_device", device)
    found: dict[int, Tensor] = {}
    map_tensors(lambda x: found.setdefault(id(x), x), nest)
    moved = {key: x.to(target) for key, x in found.items() if why_not_dense(x)}
    keys = [key for key, x in found.items() if key not in moved and x.device != target]
    (copies,) = _copies([found[key] for key in keys], [target])
    moved.update(zip(keys, copies, strict=True))
    if not non_blocking:
        wait_for_host_copies(target)
    return map_tensors(lambda x: moved.get(id(x), x), nest)


def _by_requires_grad(columns: Sequence[Sequence[Tensor]]) -> list[list[int]]:
    """Group the columns for one autograd call each: its results all require grad, or none does."""
    groups: dict[object, list[int]] = {}
    for j, column in enumerate(columns):
        differentiable = column[0].is_floating_point() or column[0].is_complex()
        requires_grad = any(x.requires_grad for x in column)
        groups.setdefault((differentiable, requires_grad), []).append(j)
    return list(groups.values())


def _copies(xs: Sequence[Tensor], targets: Sequence[torch.device]) -> list[list[Tensor]]:
    """For each target device a list of copies of ``xs``, differentiable."""
    rows: list[list[Any]] = [[None] * len(xs) for _ in targets]
    for some in _by_requires_grad([[x] for x in xs]):
        pair = copy_pair([xs[j].device for j in some], [[target] * len(some) for target in targets])
        copies = iter(apply(pair, [xs[j] for j in some]))
        for row in rows:
            for j in some:
                row[j] = next(copies)
    return rows
