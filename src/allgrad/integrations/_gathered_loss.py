"""A loss that compares the own rows with the rows of all ranks, with our gather inside."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from torch import nn

from allgrad.containers import map_tensors

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor

    from allgrad.integrations._rows import RowGather

__all__ = ["GatheredLoss"]


class GatheredLoss(nn.Module, ABC):
    """A loss of theirs with ``gather_across_devices=True``, exact for batches of any sizes.

        rank 0   own rows [ a a ]     with   [ a a | b | c c c ]     mean over 2 * 3 * 2/6
        rank 1   own row  [ b ]       with   [ a a | b | c c c ]     mean over 1 * 3 * 1/6
        rank 2   own rows [ c c c ]   with   [ a a | b | c c c ]     mean over 3 * 3 * 3/6

    The loss of a rank is its mean times ``batch_weight``, so that the average over ranks, which DDP
    and FSDP take, is the loss of the joined batch, and so is its gradient. Every rank has a row.
    """

    def __init__(self, loss: nn.Module) -> None:
        """``loss`` is used as it is; its options stay readable here."""
        super().__init__()
        self.loss = loss

    def __getattr__(self, name: str) -> Any:
        """Trainers look at a loss for its ``model`` and options."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "loss":
                raise
            return getattr(self.loss, name)

    def forward(self, sentence_features: Any, labels: Tensor | None = None) -> Any:
        """The weighted loss of the own rows, or a dict of such losses."""
        with self._exact_gather() as rows:
            found = self.loss(sentence_features, labels)
            weight = self._weight(rows)
        return map_tensors(lambda loss: loss * weight, found)

    @abstractmethod
    def _exact_gather(self) -> AbstractContextManager[RowGather]:
        """Let the loss gather rows by ours, and count them."""

    def _weight(self, rows: RowGather) -> float:
        return rows.weight
