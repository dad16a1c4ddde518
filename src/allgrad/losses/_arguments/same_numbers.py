"""Checked mode: the ranks compare the values of scale and bias, and of a tensor that is one for all."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

import torch

from allgrad._autograd.below_transforms import in_vmap
from allgrad._wire import consistency
from allgrad._wire.calls import resolve
from allgrad._wire.codec import Reader, Writer
from allgrad.collectives.all_gather import all_gather
from allgrad.errors import InputError, rank_table
from allgrad.losses._arguments.feature_checks import number
from allgrad.losses._tiles.accumulators import accumulator_dtype

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from allgrad.types import GroupLike

__all__ = ["compared_numbers", "require_alike", "require_same_numbers"]

_NEAR = 0.01  # of the norm; ranks may round differently


def compared_numbers(
    numbers: Mapping[str, Tensor | float | None], features: Tensor
) -> dict[str, float | None]:
    """In checked mode the values of these numbers, in the dtype of the loss's sums; otherwise nothing.

    Nothing in a batch of torch.vmap either, whose values cannot be read.
    """
    if not consistency.is_checking() or in_vmap():
        return {}
    dtype = accumulator_dtype(features.dtype)
    return {  # 0.0 for -0.0 too
        name: None if x is None else float(number(x).detach().to(dtype)) + 0.0
        for name, x in numbers.items()
    }


def require_same_numbers(
    name: str, numbers: Mapping[str, Tensor | float | None], features: Tensor, group: GroupLike
) -> None:
    """In checked mode, raise on every rank if one of these numbers has another value on some rank.

    One small message, for losses that may have made none before.
    """
    own = compared_numbers(numbers, features)
    if not own or resolve(name, group).size == 1:
        return
    message = Writer("loss")
    for value in own.values():
        message.number(value is not None)
        message.real(value or 0.0)
    row = torch.tensor([message.words], dtype=torch.int64, device=features.device)
    rows = all_gather(row, sizes="equal", group=group, grad="none").tolist()
    ranks = [_read(words, len(own), sender) for sender, words in enumerate(rows)]
    for column, which in enumerate(own):
        ((usual, _),) = Counter(values[column] for values in ranks).most_common(1)
        odd = {r: f"other {which}" for r, values in enumerate(ranks) if values[column] != usual}
        if odd:
            shown = [", ".join(map(" ".join, zip(own, values, strict=True))) for values in ranks]
            rule = f"have the same {which}"
            table = rank_table(
                f"{name}: all ranks must {rule}.", shown, odd, f"Let every rank {rule}."
            )
            raise InputError(table)


def require_alike(name: str, which: str, x: Tensor, group: GroupLike) -> None:
    """In checked mode, raise on every rank if a tensor that is the same on all ranks is another on some.

    One small message, with a projection of the tensor: a fixed vector for its rows, one for its columns.
    """
    if not consistency.is_checking() or x.is_meta or in_vmap() or not x.numel():
        return
    call = resolve(name, group)
    if call.size == 1:
        return
    matrix = x.detach().reshape(-1, x.shape[-1])
    signs = [torch.arange(1, n + 1, device=x.device).float().cos() for n in matrix.shape]
    shrunk = signs[1] / len(signs[1]) ** 0.5  # or a product may be too large for float16
    projected = (matrix @ shrunk.to(x.dtype)).double() @ signs[0].double() * len(signs[1]) ** 0.5
    own = torch.stack([projected, torch.linalg.vector_norm(matrix, dtype=torch.float64)])
    found = all_gather(own[None], sizes="equal", group=group, grad="none").tolist()
    usual, norm = sorted(found, key=lambda one: (math.isnan(one[0]), one))[len(found) // 2]
    odd = {
        r: f"other {which}" for r, (value, _) in enumerate(found) if not _near(value, usual, norm)
    }
    if odd:
        shown = [f"{which} of norm {norm:.6g}, projected {value:.6g}" for value, norm in found]
        rule = f"{name}: {which} must be the same on every rank."
        advice = f"Give every rank the same {which}: the same input, weights and dropout."
        raise InputError(rank_table(rule, shown, odd, advice))


def _near(value: float, usual: float, norm: float) -> bool:
    if math.isfinite(value) and math.isfinite(usual):
        return abs(value - usual) <= _NEAR * norm
    return repr(value) == repr(usual)  # infinite or no number on both


def _read(words: list[int], count: int, sender: int) -> list[str]:
    """The numbers of a rank, as text with all digits."""
    message = Reader(words, "loss", sender)
    found = [(message.number(0, 1), message.real()) for _ in range(count)]
    return [str(value) if given else "None" for given, value in found]
