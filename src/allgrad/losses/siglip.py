"""SigLIP: for each image and each text, whether they are a pair."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from allgrad.losses._arguments import BUDGET, Grads, contrastive

if TYPE_CHECKING:
    from allgrad._wire.primitives import GroupLike
    from allgrad.types import Sizes

__all__ = ["SigLipLoss", "siglip_loss"]


def siglip_loss(
    image: Tensor,
    text: Tensor,
    scale: Tensor | float,
    bias: Tensor | float | None = None,
    *,
    grads: Grads = "mean",
    sizes: Sizes = None,
    group: GroupLike = None,
    ring: bool | None = None,
    budget: int = BUDGET,
) -> Tensor:
    """Tell for each image and text of all ranks whether they are a pair: the sum over the texts.

        rank 0   image [ a a ]     text [ a a ]           loss of [ a a | b | c c c ]
        rank 1   image [ b ]       text [ b ]      --->   loss of [ a a | b | c c c ]
        rank 2   image [ c c c ]   text [ c c c ]         loss of [ a a | b | c c c ]

    Every rank gets the loss of the joined batch, the mean over its images. Gradient and arguments
    as in ``clip_loss``.

    Cost: each score is computed once in the world. The gradient is made in the same pass, and
    backward only multiplies it.
    """
    return contrastive(
        "siglip_loss",
        {"image": image, "text": text},
        {"scale": scale, "bias": bias},
        kind="sigmoid",
        grads=grads,
        sizes=sizes,
        group=group,
        ring=ring,
        budget=budget,
    )


class SigLipLoss(nn.Module):
    """``siglip_loss`` as a module, called as open_clip calls its own."""

    def __init__(
        self,
        *,
        grads: Grads = "mean",
        sizes: Sizes = None,
        group: GroupLike = None,
        ring: bool | None = None,
        budget: int = BUDGET,
    ) -> None:
        super().__init__()
        self.grads, self.sizes = grads, sizes
        self.group, self.ring, self.budget = group, ring, budget

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        """Give the loss, or a dict of it."""
        loss = siglip_loss(
            image_features,
            text_features,
            logit_scale,
            logit_bias,
            grads=self.grads,
            sizes=self.sizes,
            group=self.group,
            ring=self.ring,
            budget=self.budget,
        )
        return {"contrastive_loss": loss} if output_dict else loss
