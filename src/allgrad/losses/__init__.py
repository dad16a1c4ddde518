"""Contrastive losses over the pairs of all ranks: exact, ragged, and never the whole matrix of scores."""

from allgrad.losses.cached import cached_step
from allgrad.losses.clip import ClipLoss, clip_loss
from allgrad.losses.info_nce import InfoNCE, info_nce
from allgrad.losses.siglip import SigLipLoss, siglip_loss

__all__ = [
    "ClipLoss",
    "InfoNCE",
    "SigLipLoss",
    "cached_step",
    "clip_loss",
    "info_nce",
    "siglip_loss",
]
