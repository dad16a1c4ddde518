"""The arguments of a call, ``(args, kwargs)``: pack into one tuple, move, cast, split over devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn.utils.rnn import PackedSequence

from allgrad.containers.kinds import nodes
from allgrad.containers.nests import map_tensors
from allgrad.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    from torch import Tensor

    Args = tuple[Any, ...]
    Kwargs = dict[str, Any]

__all__ = ["cast_call", "move_call", "pack_call", "scatter_call", "unpack_call"]


def pack_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[str, ...], Args]:
    """Put the arguments of a call into one flat tuple, keyword arguments last; also return the keys.

    (1, 2), {"a": 3, "b": 4}   --->   ("a", "b")   and   (1, 2, 3, 4)
    """
    return tuple(kwargs), (*args, *kwargs.values())


def unpack_call(keys: Sequence[str], flat: Sequence[Any]) -> tuple[Args, Kwargs]:
    """Undo :func:`pack_call`: the last values belong to ``keys``, the others are positional."""
    if len(keys) > len(flat):
        raise InputError(
            f"unpack_call: {len(keys)} keys need as many values; {len(flat)} were given.\n"
            f"  keys: {', '.join(keys)}"
        )
    if len(set(keys)) < len(keys):
        raise InputError(f"unpack_call: a key appears twice.\n  keys: {', '.join(keys)}")
    positional = len(flat) - len(keys)
    return tuple(flat[:positional]), dict(zip(keys, flat[positional:], strict=True))


def move_call(
    args: Sequence[Any], kwargs: Mapping[str, Any] | None, device: torch.device | str | int
) -> tuple[Args, Kwargs]:
    """The arguments with all tensors on ``device``; a tensor that is already there is not copied.

    Gradients are moved back to the device of each tensor.
    """
    return _map_call(lambda tensor: tensor.to(device), args, kwargs)


def cast_call(
    args: Sequence[Any], kwargs: Mapping[str, Any] | None, dtype: torch.dtype | None
) -> tuple[Args, Kwargs]:
    """The arguments with floating-point tensors in ``dtype``; None leaves them as they are.

    Integer, bool and complex tensors are returned as they are, and so are tensors already in
    ``dtype``. The cast is differentiable: a gradient has the dtype of the original tensor, and of a
    cast to a complex ``dtype`` it is the real part.
    """
    if dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
        raise InputError(
            f"cast_call: dtype must be a floating-point or complex dtype, not {dtype}.\n"
            "Others would truncate values, and have no gradient."
        )

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    return _map_call(cast, args, kwargs)


def scatter_call(
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    scatter: Callable[[Tensor], Sequence[Tensor]],
    *,
    parts: int,
) -> tuple[tuple[Args, ...], tuple[Kwargs, ...]]:
    """Split one call into a call for each device: ``scatter`` splits tensors, the rest is repeated.

        f([a b c], mask={"m": [p q r]}, k=3)   --->   f([a], mask={"m": [p]}, k=3)
                                                      f([b], mask={"m": [q]}, k=3)
                                                      f([c], mask={"m": [r]}, k=3)

    The number of calls is the number of pieces that ``scatter`` makes of each tensor, at most
    ``parts``: a batch that is too short for all devices uses fewer. Tensors with different numbers
    of pieces raise, since a piece would be lost. A call without tensors is repeated ``parts``
    times. Both results have the same length; missing arguments are ``()`` or ``{}``.
    """
    if parts < 1:
        raise InputError(f"scatter_call: parts must be at least 1, not {parts}.")
    call = _call(args, kwargs)
    if any(isinstance(node, PackedSequence) for node in nodes(call)):
        raise InputError(
            "scatter_call: a PackedSequence cannot be split: its rows belong to several sequences.\n"
            "Scatter the padded batch, and pack it on each device."
        )
    pieces: list[Sequence[Tensor]] = []  # of each tensor, in the order in which map_tensors visits

    def scatter_one(tensor: Tensor) -> Tensor:
        pieces.append(scatter(tensor))
        return tensor

    def one_part(part: int) -> tuple[Args, Kwargs]:
        visited = iter(pieces)
        return map_tensors(lambda _: next(visited)[part], call)

    map_tensors(scatter_one, call)
    calls = [one_part(part) for part in range(_same_count(pieces, parts))]
    return tuple(args for args, _ in calls), tuple(dict(kwargs) for _, kwargs in calls)


def _same_count(pieces: list[Sequence[Tensor]], parts: int) -> int:
    counts = [len(each) for each in pieces] or [parts]
    if len(set(counts)) > 1:
        raise InputError(
            "scatter_call: all tensors of a call must give the same number of parts, not "
            f"{', '.join(map(str, counts))}.\n"
            "Give them the same length along the dimension that is split."
        )
    if not 1 <= counts[0] <= parts:
        raise InputError(f"scatter_call: scatter gave {counts[0]} parts for {parts} devices.")
    return counts[0]


def _map_call(
    fn: Callable[[Tensor], Tensor], args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> tuple[Args, Kwargs]:
    # In one call, so that a tensor given twice is one tensor afterwards.
    return map_tensors(fn, _call(args, kwargs))


def _call(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> tuple[Args, Kwargs]:
    return tuple(args), kwargs if isinstance(kwargs, dict) else dict(kwargs or {})
