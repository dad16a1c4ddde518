"""Pairs of all ranks from one seed, and the losses of one process that holds them all."""

import torch
from torch.nn.functional import logsigmoid, normalize

from allgrad.losses import clip_loss, info_nce_loss, reference, siglip_loss
from exactness import random

PAIRS = {"equal": (3, 3, 3, 3), "ragged": (4, 1, 2, 5), "empty": (3, 0, 4, 2)}
NEGATIVES = (2, 3, 0, 1)
WIDTH = 6

LOSSES = {
    "clip": (clip_loss, reference.clip, {}),
    "clip, smoothed": (clip_loss, reference.clip, {"label_smoothing": 0.1}),
    "siglip": (siglip_loss, reference.siglip, {}),
    "info_nce": (info_nce_loss, reference.info_nce, {}),
    "info_nce, smoothed": (info_nce_loss, reference.info_nce, {"label_smoothing": 0.2}),
    "info_nce, negatives": (info_nce_loss, reference.info_nce, {}),
}


def batch(name, counts, rank=None, dtype=torch.float64, width=WIDTH):
    """The arguments of a loss as leaf tensors: of one rank, or joined."""
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


def saturated(counts, dtype, width=32):
    """Images and texts of all ranks: each pair close together, far from all others."""
    image = normalize(random((sum(counts), width), 400), dim=1)
    text = normalize(image + normalize(random((sum(counts), width), 401), dim=1) / 10, dim=1)
    return image.to(dtype), text.to(dtype)


def _others(scores):
    pairs = scores.diagonal()
    return scores.masked_fill(torch.eye(len(scores), dtype=torch.bool), -torch.inf), pairs


def _clip(image, text, scale):
    scores, pairs = _others(scale * image @ text.T)
    terms = [-logsigmoid(pairs - scores.logsumexp(dim)) for dim in (0, 1)]
    return sum(terms).mean() / 2


def _info_nce(query, key, scale):
    scores, pairs = _others(scale * query @ key.T)
    return -logsigmoid(pairs - scores.logsumexp(1)).mean()


def _siglip(image, text, scale, bias):
    scores, pairs = _others(scale * image @ text.T + bias)
    return -(logsigmoid(-scores).sum() + logsigmoid(pairs).sum()) / len(image)


# The formulas of the reference lose a tiny loss to rounding even in float64; these keep it.
SATURATED = {
    "clip": (clip_loss, _clip, (40.0,)),
    "info_nce": (info_nce_loss, _info_nce, (40.0,)),
    "siglip": (siglip_loss, _siglip, (60.0, -40.0)),
}
