"""Losses over the samples, or the vocabulary, of all ranks: exact, ragged, never the whole score matrix.

Imports ``collectives``, ``types``, ``_autograd``, ``_wire``, ``_core`` and ``errors``.
"""

from allgrad.losses.clip import ClipLoss, clip_loss
from allgrad.losses.grad_cache import grad_cache_step
from allgrad.losses.info_nce import InfoNCELoss, info_nce_loss
from allgrad.losses.key_queue import KeyQueue
from allgrad.losses.maxsim import maxsim_loss
from allgrad.losses.multiple_negatives import multiple_negatives_loss
from allgrad.losses.siglip import SigLipLoss, siglip_loss
from allgrad.losses.supcon import sigmoid_supcon_loss, supcon_loss
from allgrad.losses.vocab_cross_entropy import cross_entropy

__all__ = [
    "ClipLoss",
    "InfoNCELoss",
    "KeyQueue",
    "SigLipLoss",
    "clip_loss",
    "cross_entropy",
    "grad_cache_step",
    "info_nce_loss",
    "maxsim_loss",
    "multiple_negatives_loss",
    "siglip_loss",
    "sigmoid_supcon_loss",
    "supcon_loss",
]
