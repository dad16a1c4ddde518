"""Accelerate, and with it the Trainer of transformers: ``gather`` with gradient, of unequal sizes.

Their gather has no gradient, and over unequal sizes it raises, hangs or mixes the rows up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from allgrad.collectives.all_gather import all_gather
from allgrad.integrations._library import needs, replaced

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from allgrad.types import Nest

with needs("accelerate"):
    import accelerate

__all__ = ["Accelerator", "exact_gather", "gather"]


def gather(tensor: Nest) -> Nest:
    """The rows of all ranks, joined in rank order, of any sizes, with their exact gradients.

        rank 0   [ a a ]              [ a a | b | c c c ]
        rank 1   [ b ]       --->     [ a a | b | c c c ]
        rank 2   [ c c c ]            [ a a | b | c c c ]

    If every rank computes the same loss of the result, the average over ranks that DDP takes is the
    exact gradient. A tensor without dimensions counts as a vector of one, as in theirs.
    """
    return all_gather(tensor)


class Accelerator(accelerate.Accelerator):
    """Their ``Accelerator`` with our :func:`gather`, which ``gather_for_metrics`` calls too."""

    def gather(self, tensor: Nest) -> Nest:
        """The rows of all ranks; see :func:`gather`."""
        return gather(tensor)


def exact_gather(accelerator: accelerate.Accelerator) -> AbstractContextManager[None]:
    """Inside the block this accelerator has our :func:`gather`: ``exact_gather(trainer.accelerator)``."""
    return replaced(accelerator, gather=gather)
