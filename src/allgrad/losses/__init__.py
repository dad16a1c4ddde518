"""Contrastive losses over the pairs of all ranks: exact, ragged, never the whole score matrix.

Imports ``collectives``, ``_wire``, ``_core`` and ``errors``.
"""

from allgrad.losses.clip import ClipLoss, clip_loss
from allgrad.losses.grad_cache import cached_step
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
