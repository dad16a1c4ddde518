"""Any loss of a batch, given the joined batch of all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from allgrad._core.held_group import HoldsGroup
from allgrad.collectives.all_gather import all_gather
from allgrad.containers import split_tensors
from allgrad.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from allgrad.types import GroupLike

__all__ = ["JoinedLoss"]

# Options by which libraries gather inside a loss.
_GATHERS = ("gather_distributed", "gather_across_devices", "sinkhorn_gather_distributed")


class JoinedLoss(HoldsGroup, nn.Module):
    """Gather the batch of every rank, and give the whole of it to a loss that gathers nothing.

        rank 0   [ a a ]                                    loss(a a | b | c c c)
        rank 1   [ b ]       --->   [ a a | b | c c c ]     loss(a a | b | c c c)
        rank 2   [ c c c ]                                  loss(a a | b | c c c)

    Tensors with a batch dimension are joined along dim 0, everything else (a scale, a flag) goes
    in as it is. Every rank has the loss of the joined batch. Gradient: exactly of that loss, once
    DDP or FSDP has averaged the ranks' gradients; no factor is needed, also for parameters inside
    the loss. Batches may be unequal, and empty.

    Cost: every rank computes the whole loss. One size exchange and one collective forward, one
    collective backward, for all tensors of a dtype together.
    """

    def __init__(self, loss: Callable[..., Any], *, group: GroupLike = None) -> None:
        """``loss`` is a module or a function of one process."""
        super().__init__()
        for name in _GATHERS:
            if getattr(loss, name, False):
                raise InputError(
                    f"JoinedLoss: {type(loss).__name__} gathers by itself: {name}=True.\n"
                    f"Create it with {name}=False: it gets the joined batch."
                )
        self.loss, self.group = loss, group

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The loss of the joined batch."""
        tensors, frame = split_tensors((args, kwargs))
        pieces = [x for x in tensors if x.ndim > 0]
        joined = iter(all_gather(pieces, group=self.group) if pieces else ())
        filled: list[Tensor] = [next(joined) if x.ndim > 0 else x for x in tensors]
        joined_args, joined_kwargs = frame(filled)
        return self.loss(*joined_args, **joined_kwargs)
