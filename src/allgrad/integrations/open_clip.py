"""open_clip: ``gather_features`` and ``create_loss``.

Their gather needs equal batches. Without ``gather_with_grad`` and ``local_loss`` the gradient is that
of the own features only, and DDP's mean divides it by W.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn.functional import cross_entropy

from allgrad.collectives.all_gather import all_gather, gather_sizes
from allgrad.collectives.all_reduce import all_reduce
from allgrad.errors import InputError, rank_table
from allgrad.integrations._joined_loss import JoinedLoss
from allgrad.integrations._library import needs, replaced
from allgrad.losses import ClipLoss, SigLipLoss, clip_loss

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor, nn

with needs("open-clip"):
    from open_clip import loss as theirs

__all__ = ["ClipLoss", "CoCaLoss", "SigLipLoss", "create_loss", "exact_gather", "gather_features"]


def create_loss(args: Any) -> nn.Module:
    """The loss that their ``create_loss`` would choose, over the pairs of all ranks, in any number.

    Its average over ranks, which DDP takes, is the loss of the joined batch. Their ``local_loss``,
    ``gather_with_grad`` and ``loss_dist_impl`` choose between ways of gathering: they have no effect.
    """
    if args.distill:
        return JoinedLoss(theirs.DistillClipLoss())
    if "coca" in args.model.lower():
        return CoCaLoss(args.coca_caption_loss_weight, args.coca_contrastive_loss_weight)
    return SigLipLoss() if args.siglip else ClipLoss()


class CoCaLoss(theirs.CoCaLoss):
    """Their ``CoCaLoss``: pairs of all ranks, and captions weighted by the tokens of each rank."""

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logits: Tensor,
        labels: Tensor,
        logit_scale: Tensor,
        output_dict: bool = False,
    ) -> dict[str, Tensor] | tuple[Tensor, Tensor]:
        """Both losses; a weight of 0 leaves the contrastive one out, as theirs does."""
        contrastive = logits.new_zeros(())
        if self.clip_loss_weight:
            pairs = clip_loss(image_features, text_features, logit_scale)
            contrastive = self.clip_loss_weight * pairs
        ignored = self.caption_loss.ignore_index
        own = cross_entropy(logits.mT, labels, ignore_index=ignored, reduction="sum")
        # Divided by the mean number of tokens: the average over ranks is the mean over all tokens.
        tokens = all_reduce(labels.ne(ignored).sum().float(), "mean", grad="none")
        caption = self.caption_loss_weight * own / tokens
        if output_dict:
            return {"contrastive_loss": contrastive, "caption_loss": caption}
        return contrastive, caption


def exact_gather() -> AbstractContextManager[None]:
    """Inside the block their losses, except SigLIP's, gather with :func:`gather_features`."""
    return replaced(theirs, gather_features=gather_features)


def gather_features(
    image_features: Tensor, text_features: Tensor, local_loss: bool = False, **_: Any
) -> tuple[Tensor, Tensor]:
    """All image features and all text features, joined in rank order, with their exact gradients.

    With ``local_loss``, theirs finds its rows as rank times batch size: batches must be equal.
    """
    sizes = gather_sizes(image_features)
    if local_loss and len(set(sizes)) > 1:
        raise InputError(
            rank_table(
                "gather_features: local_loss needs equal batches.",
                [f"{size} pairs" for size in sizes],
                {rank: "differs" for rank, size in enumerate(sizes) if size != sizes[0]},
                "Use local_loss=False, or allgrad.integrations.open_clip.create_loss.",
            )
        )
    return all_gather(image_features), all_gather(text_features)
