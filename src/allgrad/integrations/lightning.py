"""Lightning: ``all_gather`` of Fabric and of the Trainer, by a strategy.

Their strategies stack the ranks' tensors, which must be equal, and take the gradient of
``torch.distributed.nn``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from allgrad.collectives.all_gather import all_gather
from allgrad.integrations._library import needs

if TYPE_CHECKING:
    from torch import Tensor

    from allgrad.types import Grad, GroupLike

with needs("lightning"):
    from lightning.fabric.strategies import DDPStrategy as TheirFabricStrategy
    from lightning.pytorch.strategies import DDPStrategy as TheirTrainerStrategy

__all__ = ["ExactGather", "FabricDDPStrategy", "TrainerDDPStrategy"]


class ExactGather:
    """Mix-in for a strategy of Fabric or of the Trainer: put it before the class of theirs.

        rank 0   [ a a ]              [ a a | b | c c c ]
        rank 1   [ b ]       --->     [ a a | b | c c c ]
        rank 2   [ c c c ]            [ a a | b | c c c ]

    ``fabric.all_gather`` and ``LightningModule.all_gather`` give the rows of all ranks joined along
    dim 0, of any sizes, with the exact gradient if ``sync_grads``. Theirs are stacked:
    ``stacked = True`` keeps that shape, (ranks, rows, ...), and needs equal tensors.
    """

    stacked = False

    def all_gather(
        self, tensor: Tensor, group: GroupLike = None, sync_grads: bool = False
    ) -> Tensor:
        """Joined, or stacked, in rank order."""
        grad: Grad = "sum" if sync_grads else "none"
        rows = tensor.unsqueeze(0) if self.stacked else tensor
        return all_gather(rows, group=group, grad=grad)


class FabricDDPStrategy(ExactGather, TheirFabricStrategy):
    """``Fabric(strategy=FabricDDPStrategy(...))``: their ``DDPStrategy`` with our gather."""


class TrainerDDPStrategy(ExactGather, TheirTrainerStrategy):
    """``Trainer(strategy=TrainerDDPStrategy(...))``: their ``DDPStrategy`` with our gather."""
