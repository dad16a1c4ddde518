"""SigLIP: for each image and each text, whether they are a pair."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from allgrad._core.held_group import HoldsGroup
from allgrad.losses._graphs.in_graphs import in_graphs
from allgrad.losses._kind import LossKind
from allgrad.losses._pairs.global_loss import BUDGET, GradReduction, global_loss

if TYPE_CHECKING:
    from allgrad.types import GroupLike, Sizes

__all__ = ["SigLipLoss", "siglip_loss"]


@in_graphs
def siglip_loss(
    image: Tensor,
    text: Tensor,
    scale: Tensor | float,
    bias: Tensor | float | None = None,
    *,
    grad_reduction: GradReduction = "mean",
    sizes: Sizes = None,
    group: GroupLike = None,
    ring: bool | None = None,
    budget: int = BUDGET,
) -> Tensor:
    """Binary cross entropy of each image with each text of all ranks: whether they are a pair.

        rank 0   image [ a a ]     text [ a a ]           loss of [ a a | b | c c c ]
        rank 1   image [ b ]       text [ b ]      --->   loss of [ a a | b | c c c ]
        rank 2   image [ c c c ]   text [ c c c ]         loss of [ a a | b | c c c ]

    Every rank gets the loss of the joined batch: the sum over texts, averaged over images. Gradient
    and arguments: see ``clip_loss``.

    Cost: each score is computed once, by one rank. Where scores are not kept, forward computes the
    gradient in the same pass, and backward only multiplies it. Calls: see ``clip_loss``.
    """
    return global_loss(
        "siglip_loss",
        LossKind.SIGMOID,
        {"image": image, "text": text},
        {"scale": scale, "bias": bias},
        grad_reduction=grad_reduction,
        sizes=sizes,
        group=group,
        ring=ring,
        budget=budget,
    )


class SigLipLoss(HoldsGroup, nn.Module):
    """``siglip_loss`` as a module with the call signature of open_clip's ``SigLipLoss``."""

    def __init__(
        self,
        *,
        grad_reduction: GradReduction = "mean",
        sizes: Sizes = None,
        group: GroupLike = None,
        ring: bool | None = None,
        budget: int = BUDGET,
    ) -> None:
        super().__init__()
        self.grad_reduction, self.sizes = grad_reduction, sizes
        self.group, self.ring, self.budget = group, ring, budget

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        """Give the loss, or a dict with it."""
        loss = siglip_loss(
            image_features,
            text_features,
            logit_scale,
            logit_bias,
            grad_reduction=self.grad_reduction,
            sizes=self.sizes,
            group=self.group,
            ring=self.ring,
            budget=self.budget,
        )
        return {"contrastive_loss": loss} if output_dict else loss
