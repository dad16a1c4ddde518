"""Checks of one rank's features, ids, weights and numbers, before the ranks compare them."""

from __future__ import annotations

import math
from numbers import Real
from typing import TYPE_CHECKING, overload

import torch
from torch import Tensor

from allgrad._autograd.below_transforms import in_vmap
from allgrad._core.dtensor import is_dtensor
from allgrad._wire.consistency import is_checking
from allgrad.errors import InputError, PieceMismatch, TensorError
from allgrad.losses._arguments.agreement import require
from allgrad.losses._arguments.rank_args import FLOATING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "check_features",
    "check_number",
    "check_options",
    "check_per_row",
    "number",
    "options_text",
    "plain_number",
    "require_dense",
    "require_device",
]

_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)  # bool may be a mask


def check_features(features: Mapping[str, Tensor | None], optional: Sequence[str] = ()) -> None:
    """Features are (rows, width), all of one dtype and width on one device; optional ones may be None."""
    given = {name: x for name, x in features.items() if x is not None or name not in optional}
    for name, x in given.items():
        _require_whole(name, x)
        require(
            isinstance(x, Tensor) and _is_plain(x) and x.dtype in FLOATING and x.dim() == 2,
            TensorError,
            f"{name} is not a floating-point tensor with one vector in each row.",
            "Give it as (rows, width) in float32, bfloat16, float16 or float64.",
        )
    first, *others = (x for x in given.values() if x is not None)
    for name, x in zip(list(given)[1:], others, strict=True):
        require(
            x.shape[1] == first.shape[1],
            PieceMismatch,
            f"{name} has another width than {next(iter(given))}.",
            "Project all features to the same width.",
        )
        require(
            x.dtype == first.dtype,
            PieceMismatch,
            f"{name} has another dtype than {next(iter(given))}.",
            "Cast all features to one dtype before the call.",
        )
    require_device(given, next(iter(given)), first)


def _require_whole(name: str, x: object) -> None:
    require(
        not is_dtensor(x),
        TensorError,
        f"{name} is a DTensor.",
        'Give its full_tensor(), of a scale full_tensor(grad_placements=[Partial("avg")]), or its to_local() '
        "where each rank has its own rows.",
    )


def require_dense(name: str, x: object) -> None:
    _require_whole(name, x)
    require(_is_plain(x), TensorError, f"{name} is not a dense tensor.", "Give one (to_dense()).")


def require_device(tensors: Mapping[str, Tensor | None], other: str, like: Tensor) -> None:
    """These tensors are on the device of ``like``, which is called ``other``; they may be None."""
    for name, x in tensors.items():
        require(
            x is None or x.device == like.device,
            TensorError,
            f"{name} is on another device than {other}, which is on {like.device}.",
            "Move them to one device before the call.",
        )


def _is_plain(x: object) -> bool:
    return isinstance(x, Tensor) and x.layout == torch.strided and not x.is_nested


def check_per_row(name: str, x: Tensor | None, rows: str, count: int, *, whole: bool) -> None:
    """One id (a whole number) or one weight for each row."""
    if x is None:
        return
    require(
        isinstance(x, Tensor) and x.dtype in (_WHOLE if whole else FLOATING) and x.dim() == 1,
        TensorError,
        f"{name} is not a vector of {'whole numbers' if whole else 'floating-point numbers'}.",
        f"Give one for each row of {rows}.",
    )
    require(
        len(x) == count,
        PieceMismatch,
        f"{name} has {len(x)} entries for {count} rows of {rows}.",
        f"Give one for each row of {rows}.",
    )
    require_dense(name, x)


def check_number(name: str, x: Tensor | float) -> None:
    """A scale or a bias is a single finite number; one on a device is read in checked mode only."""
    _require_whole(name, x)
    if isinstance(x, Tensor):
        good = _is_plain(x) and x.dtype in FLOATING and x.numel() == 1
        is_read = (x.device.type == "cpu" or is_checking()) and not in_vmap()
        # Detached: what a checkpoint sees saved must not depend on how often arguments are checked
        # (test_a_checkpointed_batch_of_another_size).
        good = good and (not is_read or bool(x.detach().isfinite().all()))
    else:
        given = plain_number(x)  # also one of NumPy
        good = isinstance(given, float) and math.isfinite(given)
    require(
        good,
        InputError,
        f"{name} is not a single finite number.",
        "Give a finite number, or a floating-point tensor of one element.",
    )


def check_options(grad_reduction: str, margin: Tensor | float | None = None) -> None:
    found = plain_number(margin)
    require(
        margin is None or (isinstance(found, float) and math.isfinite(found)),
        InputError,
        f"margin={margin!r}.",
        "Give a finite number, or None.",
    )
    require(
        isinstance(grad_reduction, str) and grad_reduction in {"mean", "sum"},
        InputError,
        f"there is no grad_reduction={grad_reduction!r}.",
        'Use "mean" if gradients are averaged over ranks after backward (DDP, FSDP), "sum" if '
        "they are summed.",
    )


def options_text(**options: object) -> str:
    """The options that must be the same on every rank: what is compared, and shown where they differ."""
    return ", ".join(f"{name}={value}" for name, value in options.items())


def plain_number(x: object) -> object:
    """A number as a float, also one of NumPy or in a tensor of one element; anything else as it is."""
    if type(x) is float:
        return x
    try:
        if isinstance(x, Tensor):
            return float(x.detach())
        return float(x) if isinstance(x, Real) else x
    except (RuntimeError, TypeError, ValueError, OverflowError):  # several, unreadable, too large
        return x


@overload
def number(x: Tensor | float) -> Tensor: ...
@overload
def number(x: Tensor | float | None) -> Tensor | None: ...
def number(x: Tensor | float | None) -> Tensor | None:
    """Float64, so that a Python float is not rounded before it multiplies float64 features.

    What is no number stays as it is.
    """
    given: object = x
    if not isinstance(given, Real):
        return x  # type: ignore[return-value]
    try:
        value = float(given)
    except OverflowError:  # an int beyond all floats
        value = math.inf
    return torch.tensor(value, dtype=torch.float64, device="cpu")
