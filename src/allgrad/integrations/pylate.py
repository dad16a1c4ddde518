"""pylate: ``losses.Contrastive`` with ``gather_across_devices=True``.

Their loss multiplies by the number of ranks, which DDP's mean does not take back: the gradient is W
times that of one process. Their gather needs equal batches and equally long documents.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from allgrad.errors import InputError
from allgrad.integrations._gathered_loss import GatheredLoss as _GatheredLoss
from allgrad.integrations._library import needs, replaced
from allgrad.integrations._rows import RowGather, pad_to_longest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from torch import Tensor, nn

with needs("pylate"):
    from pylate.losses import contrastive as theirs

__all__ = ["GatheredLoss", "exact_gather"]


@contextmanager
def exact_gather() -> Iterator[RowGather]:
    """Inside the block ``Contrastive`` gathers with ours: documents of any number and length.

    The block gives an object whose ``weight`` is to be multiplied with the loss; see ``GatheredLoss``.
    """
    rows = RowGather()

    def gather(tensor: Tensor) -> list[Tensor]:
        return [rows(pad_to_longest(tensor))]

    with replaced(
        theirs,
        all_gather=gather,
        all_gather_with_gradients=gather,
        get_rank=rows.first_row,
        get_world_size=lambda: 1,
    ):
        yield rows


class GatheredLoss(_GatheredLoss):
    __doc__ = _GatheredLoss.__doc__

    def __init__(self, loss: nn.Module) -> None:
        """``loss`` is used as it is; its options stay readable here."""
        super().__init__(loss)
        if not isinstance(loss, theirs.Contrastive):
            raise InputError(
                f"GatheredLoss: {type(loss).__name__} is not a Contrastive loss.\n"
                "The gradient of CachedContrastive is not the gradient of its own mean: it is not "
                "divided by the batch size."
            )

    def _exact_gather(self) -> AbstractContextManager[RowGather]:
        return exact_gather()

    def _weight(self, rows: RowGather) -> float:
        return rows.weight if self.loss.size_average else float(len(rows.sizes))
