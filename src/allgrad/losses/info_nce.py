"""InfoNCE: each query among all keys, and among keys that belong to nobody."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from allgrad.losses._arguments import BUDGET, Grads, contrastive

if TYPE_CHECKING:
    from allgrad._wire.primitives import GroupLike
    from allgrad.types import Sizes

__all__ = ["InfoNCE", "info_nce"]


def info_nce(
    query: Tensor,
    key: Tensor,
    scale: Tensor | float,
    hard_negatives: Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    grads: Grads = "mean",
    sizes: Sizes = None,
    group: GroupLike = None,
    ring: bool | None = None,
    budget: int = BUDGET,
) -> Tensor:
    """Find each query's key among those of all ranks: cross entropy along the rows of the scores.

        rank 0   query [ a a ]     key [ a a ]     negatives [ x ]
        rank 1   query [ b ]       key [ b ]       negatives [ ]      --->   loss of [ a a | b | c c c ]
        rank 2   query [ c c c ]   key [ c c c ]   negatives [ y y ]         among those and [ x | y y ]

    Every rank gets the loss of the joined batch. ``hard_negatives`` are further keys, (n, width) or
    (pairs, n, width), as many on a rank as it likes; each is a negative for all queries of all
    ranks. Gradient, arguments and cost as in ``clip_loss``.
    """
    return contrastive(
        "info_nce",
        {"query": query, "key": key, "hard_negatives": hard_negatives},
        {"scale": scale},
        kind="rows",
        label_smoothing=label_smoothing,
        grads=grads,
        sizes=sizes,
        group=group,
        ring=ring,
        budget=budget,
    )


class InfoNCE(nn.Module):
    """``info_nce`` as a module."""

    def __init__(
        self,
        *,
        label_smoothing: float = 0.0,
        grads: Grads = "mean",
        sizes: Sizes = None,
        group: GroupLike = None,
        ring: bool | None = None,
        budget: int = BUDGET,
    ) -> None:
        super().__init__()
        self.label_smoothing, self.grads, self.sizes = label_smoothing, grads, sizes
        self.group, self.ring, self.budget = group, ring, budget

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        scale: Tensor | float,
        hard_negatives: Tensor | None = None,
    ) -> Tensor:
        """Give the loss."""
        return info_nce(
            query,
            key,
            scale,
            hard_negatives,
            label_smoothing=self.label_smoothing,
            grads=self.grads,
            sizes=self.sizes,
            group=self.group,
            ring=self.ring,
            budget=self.budget,
        )
