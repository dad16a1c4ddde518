"""pytorch-metric-learning: ``DistributedLossWrapper`` and ``DistributedMinerWrapper``.

Theirs need equal batches, have the own rows first (another order on every rank), and multiply the loss
by the number of ranks, also for parameters inside the loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from allgrad.collectives.all_gather import all_gather
from allgrad.errors import InputError
from allgrad.integrations._library import needs

if TYPE_CHECKING:
    from torch import Tensor, nn

with needs("pytorch-metric-learning"):
    from pytorch_metric_learning.losses import CrossBatchMemory
    from pytorch_metric_learning.utils import distributed as theirs

__all__ = ["DistributedLossWrapper", "DistributedMinerWrapper"]


class DistributedLossWrapper(theirs.DistributedLossWrapper):
    """Give any of their losses the embeddings of all ranks, joined in rank order.

        rank 0   [ a a ]                                    loss(a a | b | c c c)
        rank 1   [ b ]       --->   [ a a | b | c c c ]     loss(a a | b | c c c)
        rank 2   [ c c c ]                                  loss(a a | b | c c c)

    Every rank has the loss of the joined batch, also for pairs mined from it. The gradient is exact
    once DDP has averaged it, without a factor, also for parameters inside the loss.

    Cost: every rank computes the whole loss. One size exchange and one collective forward, one
    collective backward.
    """

    def __init__(self, loss: nn.Module, efficient: bool = False) -> None:
        """``efficient`` would reduce the own pairs only; means of means are not the mean of all."""
        _check_efficient("DistributedLossWrapper", efficient)
        super().__init__(loss)

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: Any = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        enqueue_mask: Tensor | None = None,
    ) -> Tensor:
        """The loss of the joined batch."""
        joined = _join(
            emb=embeddings, labels=labels, ref=ref_emb, ref_labels=ref_labels, mask=enqueue_mask
        )
        emb, labels = joined["emb"], joined.get("labels")
        if isinstance(self.loss, CrossBatchMemory):
            if ref_emb is not None or ref_labels is not None:
                raise InputError(
                    "DistributedLossWrapper: CrossBatchMemory takes no ref_emb and no ref_labels."
                )
            return self.loss(emb, labels, indices_tuple, joined.get("mask"))  # type: ignore[no-any-return]
        ref, ref_labels = joined.get("ref"), joined.get("ref_labels")
        return self.loss(emb, labels, indices_tuple, ref, ref_labels)  # type: ignore[no-any-return]


class DistributedMinerWrapper(theirs.DistributedMinerWrapper):
    """Mine pairs or triplets in the embeddings of all ranks, joined in rank order."""

    def __init__(self, miner: nn.Module, efficient: bool = False) -> None:
        """``efficient`` belongs to losses of the own pairs only."""
        _check_efficient("DistributedMinerWrapper", efficient)
        super().__init__(miner)

    def forward(
        self,
        emb: Tensor,
        labels: Tensor,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Any:
        """Indices into the joined batch, the same on every rank if the miner draws nothing."""
        joined = _join(emb=emb, labels=labels, ref=ref_emb, ref_labels=ref_labels)
        found = (joined["emb"], joined["labels"], joined.get("ref"), joined.get("ref_labels"))
        return self.miner(*found)


def _join(**batch: Tensor | None) -> dict[str, Tensor]:
    return all_gather({name: x for name, x in batch.items() if x is not None})


def _check_efficient(wrapper: str, efficient: bool) -> None:
    if efficient:
        raise InputError(
            f"{wrapper}: efficient=True cannot be exact. Each rank would reduce its own pairs, and\n"
            "the reducers of this library divide by numbers that only one rank knows.\n"
            "Leave efficient=False."
        )
