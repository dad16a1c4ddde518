"""colpali-engine: ``ContrastiveTrainer``.

Theirs finds its own rows as rank times batch size, and takes the gradient of ``torch.distributed.nn``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from allgrad.integrations._library import needs
from allgrad.integrations._rows import RowGather, pad_to_longest

if TYPE_CHECKING:
    from torch import Tensor

with needs("colpali"):
    from colpali_engine.trainer.contrastive_trainer import ContrastiveTrainer as TheirTrainer

__all__ = ["ContrastiveTrainer"]


class ContrastiveTrainer(TheirTrainer):
    """Their trainer, with the documents of all ranks: any number, of any length, exact gradients.

        rank 0   queries [ a a ]     among documents [ a a | b | c c c ]
        rank 1   query   [ b ]       among documents [ a a | b | c c c ]
        rank 2   queries [ c c c ]   among documents [ a a | b | c c c ]

    The loss of a rank is its mean times ``batch_weight``, so that DDP's average is the loss of the
    joined batch. The negatives of a query are its own rank's, as in theirs.
    """

    def _compute_loss_from_outputs(
        self,
        query_outputs: Tensor,
        pos_target_outputs: Tensor,
        neg_target_outputs: Tensor | None = None,
    ) -> Tensor:
        rows = RowGather()
        if pos_target_outputs.ndim > 2:  # vectors by token; theirs pads on the left too
            pos_target_outputs = pad_to_longest(pos_target_outputs, first=True)
        batch = {"query_embeddings": query_outputs, "doc_embeddings": rows(pos_target_outputs)}
        if neg_target_outputs is not None:
            batch["neg_doc_embeddings"] = neg_target_outputs
        return self.loss_func(**batch, offset=int(rows.first_row())) * rows.weight  # type: ignore[no-any-return]
