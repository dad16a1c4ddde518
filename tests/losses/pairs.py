"""Pairs of all ranks from one seed, and the loss that one process has of them."""

import torch
from torch.nn.functional import normalize

from allgrad.losses import clip_loss, info_nce, reference, siglip_loss
from exactness import random

PAIRS = {"equal": (3, 3, 3, 3), "ragged": (4, 1, 2, 5), "empty": (3, 0, 4, 2)}
NEGATIVES = (2, 3, 0, 1)
WIDTH = 6

LOSSES = {
    "clip": (clip_loss, reference.clip, {}),
    "clip, smoothed": (clip_loss, reference.clip, {"label_smoothing": 0.1}),
    "siglip": (siglip_loss, reference.siglip, {}),
    "info_nce": (info_nce, reference.info_nce, {}),
    "info_nce, smoothed": (info_nce, reference.info_nce, {"label_smoothing": 0.2}),
    "info_nce, negatives": (info_nce, reference.info_nce, {}),
}


def batch(name, counts, rank=None, dtype=torch.float64, width=WIDTH):
    """The arguments of a loss: of one rank, or joined; leaves, so that each has a gradient."""
    which = range(len(counts)) if rank is None else [rank]

    def joined(seed, sizes):
        made = [normalize(random((sizes[r], width), seed + r), dim=1) for r in which]
        return torch.cat(made).to(dtype).requires_grad_()

    features = [joined(100, counts), joined(200, counts)]
    numbers = [torch.tensor(7.5, dtype=dtype, requires_grad=True)]
    if name == "siglip":
        numbers.append(torch.tensor(-2.5, dtype=dtype, requires_grad=True))
    if name == "info_nce, negatives":
        return [*features, *numbers, joined(300, NEGATIVES[: len(counts)])]
    return [*features, *numbers]


def own_part(x, counts, rank):
    """What of a joined tensor belongs to a rank."""
    return x if x.dim() == 0 else x.split(list(counts))[rank]
