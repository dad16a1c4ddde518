"""Contrastive losses over the pairs of all ranks: exact, ragged, never the whole score matrix.

Imports ``collectives``, ``_wire``, ``types`` and ``errors``.
"""

from allgrad.losses.clip import ClipLoss, clip_loss
from allgrad.losses.grad_cache import grad_cache_step
from allgrad.losses.info_nce import InfoNCELoss, info_nce_loss
from allgrad.losses.siglip import SigLipLoss, siglip_loss

__all__ = [
    "ClipLoss",
    "InfoNCELoss",
    "SigLipLoss",
    "clip_loss",
    "grad_cache_step",
    "info_nce_loss",
    "siglip_loss",
]
