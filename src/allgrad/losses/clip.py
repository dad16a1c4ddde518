"""CLIP: each image among all texts, and each text among all images."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from allgrad.losses._arguments import BUDGET, Grads, contrastive

if TYPE_CHECKING:
    from allgrad._wire.primitives import GroupLike
    from allgrad.types import Sizes

__all__ = ["ClipLoss", "clip_loss"]


def clip_loss(
    image: Tensor,
    text: Tensor,
    scale: Tensor | float,
    *,
    label_smoothing: float = 0.0,
    grads: Grads = "mean",
    sizes: Sizes = None,
    group: GroupLike = None,
    ring: bool | None = None,
    budget: int = BUDGET,
) -> Tensor:
    """Tell the images and texts of all ranks apart: cross entropy along both sides of the scores.

        rank 0   image [ a a ]     text [ a a ]           loss of [ a a | b | c c c ]
        rank 1   image [ b ]       text [ b ]      --->   loss of [ a a | b | c c c ]
        rank 2   image [ c c c ]   text [ c c c ]         loss of [ a a | b | c c c ]

    Every rank gets the loss of the joined batch. Gradient: exactly that loss's, once the wrapper
    has averaged over ranks (``grads="mean"``: DDP, FSDP) or summed (``"sum"``); first order only.

    ``sizes`` are the pairs of each rank. Unless given, one small message finds them out and lets a
    mistake of one rank raise on all. The texts are gathered, or passed around a ring of ranks if
    they and the sums of their gradients would take more than ``budget`` bytes; ``ring=True`` or
    ``False`` decides it.

    Cost: each score is computed once in the world, forward and again backward, and no more than a
    tile of them exists. Forward moves the texts and one number for each, backward the texts' gradients.
    """
    return contrastive(
        "clip_loss",
        {"image": image, "text": text},
        {"scale": scale},
        kind="both",
        label_smoothing=label_smoothing,
        grads=grads,
        sizes=sizes,
        group=group,
        ring=ring,
        budget=budget,
    )


class ClipLoss(nn.Module):
    """``clip_loss`` as a module, called as open_clip calls its own."""

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
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | None = None,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        """Give the loss, or a dict of it. A bias moves all scores alike, so it changes nothing."""
        loss = clip_loss(
            image_features,
            text_features,
            logit_scale,
            label_smoothing=self.label_smoothing,
            grads=self.grads,
            sizes=self.sizes,
            group=self.group,
            ring=self.ring,
            budget=self.budget,
        )
        if logit_bias is not None:  # DDP waits for the gradient of every parameter, zero or not
            loss = loss + 0 * logit_bias.sum()
        return {"contrastive_loss": loss} if output_dict else loss
