"""InfoNCE: each query among all keys and all hard negatives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from allgrad._core.held_group import HoldsGroup
from allgrad.losses._graphs.in_graphs import in_graphs
from allgrad.losses._kind import LossKind
from allgrad.losses._pairs.global_loss import BUDGET, GradReduction, global_loss

if TYPE_CHECKING:
    from allgrad.types import GroupLike, Sizes

__all__ = ["InfoNCELoss", "info_nce_loss"]


@in_graphs
def info_nce_loss(
    query: Tensor,
    key: Tensor,
    scale: Tensor | float,
    hard_negatives: Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    grad_reduction: GradReduction = "mean",
    sizes: Sizes = None,
    group: GroupLike = None,
    ring: bool | None = None,
    budget: int = BUDGET,
) -> Tensor:
    """Cross entropy of each query among the keys and hard negatives of all ranks.

        rank 0   query [ a a ]     key [ a a ]     negatives [ x ]
        rank 1   query [ b ]       key [ b ]       negatives [ ]      --->   loss of [ a a | b | c c c ]
        rank 2   query [ c c c ]   key [ c c c ]   negatives [ y y ]         with negatives [ x | y y ]

    Every rank gets the loss of the joined batch. ``hard_negatives`` are further keys, (n, width) or
    (pairs, n, width); each is a negative for all queries of all ranks, and ranks may hold different
    numbers of them. With ``sizes`` given, all ranks pass ``hard_negatives`` (of any number, also
    none) or no rank does; one small message exchanges their numbers. Gradient, other arguments and
    cost: see ``clip_loss``.
    """
    return global_loss(
        "info_nce_loss",
        LossKind.SOFTMAX_ROWS,
        {"query": query, "key": key, "hard_negatives": hard_negatives},
        {"scale": scale},
        label_smoothing=label_smoothing,
        grad_reduction=grad_reduction,
        sizes=sizes,
        group=group,
        ring=ring,
        budget=budget,
    )


class InfoNCELoss(HoldsGroup, nn.Module):
    """``info_nce_loss`` as a module."""

    def __init__(
        self,
        *,
        label_smoothing: float = 0.0,
        grad_reduction: GradReduction = "mean",
        sizes: Sizes = None,
        group: GroupLike = None,
        ring: bool | None = None,
        budget: int = BUDGET,
    ) -> None:
        super().__init__()
        self.label_smoothing, self.grad_reduction = label_smoothing, grad_reduction
        self.sizes, self.group, self.ring, self.budget = sizes, group, ring, budget

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        scale: Tensor | float,
        hard_negatives: Tensor | None = None,
    ) -> Tensor:
        """Give the loss."""
        return info_nce_loss(
            query,
            key,
            scale,
            hard_negatives,
            label_smoothing=self.label_smoothing,
            grad_reduction=self.grad_reduction,
            sizes=self.sizes,
            group=self.group,
            ring=self.ring,
            budget=self.budget,
        )
