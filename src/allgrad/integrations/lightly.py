"""lightly: ``utils.dist.gather`` for unequal batches; its losses are given to ``JoinedLoss``.

Their losses with ``gather_distributed=True`` find their own rows as rank times batch size, so that no
gather makes them ragged. ``JoinedLoss(NTXentLoss())``, which gathers before the loss, does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from allgrad.collectives.all_gather import all_gather, gather_sizes
from allgrad.integrations._joined_loss import JoinedLoss
from allgrad.integrations._library import needs

if TYPE_CHECKING:
    from torch import Tensor

with needs("lightly"):
    import lightly.utils.dist  # noqa: F401

__all__ = ["JoinedLoss", "gather"]


def gather(input: Tensor) -> tuple[Tensor, ...]:  # noqa: A002 (the name of theirs)
    """The pieces of all ranks, in rank order, of any sizes, with their exact gradients."""
    sizes = gather_sizes(input)
    pieces: tuple[Tensor, ...] = all_gather(input, sizes=sizes).split(sizes)
    return pieces
