"""One process as all ranks: the formula of joined features, where each rank has numbers of its own."""

import torch

from losses.pairs import LOSSES, NEGATIVES, batch


def leaves_of_all(name, counts):
    """The joined arguments, with numbers of each rank's own: a rank's rows have its scale and bias."""
    whole = batch(name, counts)
    return [x if x.dim() else x.detach().repeat(len(counts)).requires_grad_() for x in whole]


def formula_of_all(name, counts, leaves):
    _, formula, options = LOSSES[name]
    query, key, scale, *others = leaves
    rows = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    if name == "siglip":
        others = [others[0][rows, None]]
    return formula(query * scale[rows, None], key, 1.0, *others, **options)


def pieces(name, counts, leaves, rank):
    split = [counts, counts, [1] * len(counts), [1] * len(counts)]
    if "negatives" in name:
        split[3] = NEGATIVES[: len(counts)]
    parts = [x.split(list(sizes))[rank] for x, sizes in zip(leaves, split, strict=False)]
    return [x.reshape(()) if n in {2, 3} and x.dim() == 1 else x for n, x in enumerate(parts)]
