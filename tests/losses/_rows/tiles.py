"""A tile of scores with rows of every sort."""

import torch

from allgrad.losses._rows.score_tile import ScoreTile
from exactness import leaf, random


def tile(kind, dtype, scale=1.0, weights=None):
    """Rows of every sort: one positive, several, no negative, no positive, neither."""
    scores = leaf((scale * random((6, 7), 1)).to(dtype))
    positive = torch.zeros(6, 7, dtype=torch.bool)
    positive[torch.arange(6), torch.tensor([3, 0, 6, 1, 2, 5])] = True
    negative = ~positive
    if kind != "pairs":
        positive[1, 4:], positive[3, :], positive[4:] = True, True, False
        negative = ~positive
    negative[3], negative[5], negative[0, :3] = False, False, False
    return ScoreTile(scores, positive, negative, weights)


WEIGHTS = {
    "none": None,
    "some": torch.tensor([0.5, 2.0, 0.0, 3.0, 1.0, 0.25, 1.5], dtype=torch.float64),
    "zero": torch.zeros(7, dtype=torch.float64),
    "negative": torch.tensor([-1.0, 2.0, -3.0, -1.0, -0.5, 1.0, 1.0], dtype=torch.float64),
}
