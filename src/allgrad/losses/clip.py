"""CLIP: each image among all texts, and each text among all images."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from allgrad._core.held_group import HoldsGroup
from allgrad.losses._graphs.in_graphs import in_graphs
from allgrad.losses._kind import LossKind
from allgrad.losses._pairs.global_loss import BUDGET, GradReduction, global_loss

if TYPE_CHECKING:
    from allgrad.types import GroupLike, Sizes

__all__ = ["ClipLoss", "clip_loss"]


@in_graphs
def clip_loss(
    image: Tensor,
    text: Tensor,
    scale: Tensor | float,
    *,
    label_smoothing: float = 0.0,
    grad_reduction: GradReduction = "mean",
    sizes: Sizes = None,
    group: GroupLike = None,
    ring: bool | None = None,
    budget: int = BUDGET,
) -> Tensor:
    """Cross entropy of each image among the texts of all ranks, and of each text among the images.

        rank 0   image [ a a ]     text [ a a ]           loss of [ a a | b | c c c ]
        rank 1   image [ b ]       text [ b ]      --->   loss of [ a a | b | c c c ]
        rank 2   image [ c c c ]   text [ c c c ]         loss of [ a a | b | c c c ]

    Every rank gets the loss of the joined batch. Gradient: exactly the gradient of that loss, once
    the ranks' gradients are averaged (``grad_reduction="mean"``: DDP, FSDP) or summed (``"sum"``).
    It has first and second derivatives.

    ``sizes`` are the numbers of pairs by rank. If None, one small message exchanges them, or the keys'
    own where the call is like those before, and a mistake of one rank raises on all. The texts are gathered, or passed around a ring of ranks if
    they and the accumulators of their gradients would take more than ``budget`` bytes.
    ``ring=True`` or ``ring=False`` overrides this choice.

    Cost: each score is computed by one rank, once if the scores of a rank are few, otherwise once
    in forward and once in backward with only one tile of scores at a time. A step makes three
    collective calls: the texts; one number for each text from each rank, with the loss; the
    gradients of the texts, with the ranks' weights of the loss. On CPUs every rank computes a small
    batch whole, in two calls.
    """
    return global_loss(
        "clip_loss",
        LossKind.SOFTMAX_BOTH,
        {"image": image, "text": text},
        {"scale": scale},
        label_smoothing=label_smoothing,
        grad_reduction=grad_reduction,
        sizes=sizes,
        group=group,
        ring=ring,
        budget=budget,
    )


class ClipLoss(HoldsGroup, nn.Module):
    """``clip_loss`` as a module with the call signature of open_clip's ``ClipLoss``."""

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
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        """Give the loss, or a dict with it. A bias shifts all scores alike, so it has no effect."""
        loss = clip_loss(
            image_features,
            text_features,
            logit_scale,
            label_smoothing=self.label_smoothing,
            grad_reduction=self.grad_reduction,
            sizes=self.sizes,
            group=self.group,
            ring=self.ring,
            budget=self.budget,
        )
        # DDP waits for a gradient of every parameter, even a zero one.
        if isinstance(logit_bias, Tensor):
            loss = loss + 0 * logit_bias.sum().to(loss)
        return {"contrastive_loss": loss} if output_dict else loss
