"""cross_entropy with sizes given: what is wrong on a rank travels with the sums, in no message of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from allgrad._core.torch_internals import functorch_active
from allgrad.collectives.all_gather import all_gather
from allgrad.errors import InputError
from allgrad.losses._arguments.rank_args import FLOATING
from allgrad.losses._tiles.accumulators import accumulator_dtype

if TYPE_CHECKING:
    from allgrad.types import GroupLike

__all__ = ["gather_with_mistakes", "sums_of_a_mistake"]


def gather_with_mistakes(parts: Tensor, digest: int, group: GroupLike) -> Tensor:
    """The sums of all ranks. On CPUs a further column tells which rank found a mistake of its own, and
    a digest of what all must have alike.

    A device would have to be waited for: there the sums of a rank with a mistake are NaN.
    """
    if not parts.is_cpu or functorch_active():
        return all_gather(parts[None], sizes="equal", group=group, grad="same")
    told = parts.new_zeros(len(parts), 1)
    told[1] = digest
    sent = torch.cat([parts, told], 1)
    found = all_gather(sent[None], sizes="equal", group=group, grad="same")
    problems, digests = found[:, :2, -1].detach().unbind(1)
    mistakes = problems.nonzero().flatten().tolist()
    if mistakes:
        raise InputError(
            f"cross_entropy: the arguments of rank {mistakes[0]} are wrong; its own error says how.\n"
            "With sizes=None every rank shows the arguments of all."
        )
    others = (digests != digests[0]).nonzero().flatten().tolist()
    if others:
        raise InputError(
            f"cross_entropy: rank {others[0]} has another shape or dtype of hidden, other targets, options "
            "or sizes than rank 0.\nWith sizes=None every rank shows the arguments of all."
        )
    return found[..., :-1]


def sums_of_a_mistake(
    hidden: object, weight: object, targets: object, numbers: int
) -> Tensor | None:
    """What this rank sends instead of its sums, so that the others do not wait; None if nothing tells its shape."""
    given = [x if isinstance(x, Tensor) and not x.is_nested else None for x in (hidden, weight)]
    like = next((x for x in given if x is not None and x.dtype in FLOATING), None)
    rows = given[0].shape[:-1] if given[0] is not None and given[0].dim() else None
    if rows is None and isinstance(targets, Tensor):
        rows = targets.shape
    if like is None or rows is None or functorch_active():
        return None
    # Nothing is sent of a meta tensor: on the device of the others of this rank.
    devices = [x.device for x in (*given, targets) if isinstance(x, Tensor)]
    device = next((one for one in devices if one.type != "meta"), devices[0])
    wide = accumulator_dtype(like.dtype)
    shape = 1, numbers, rows.numel() + (device.type == "cpu")
    return torch.full(shape, torch.nan, dtype=wide, device=device)
