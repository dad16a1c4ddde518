"""The model: a tower for pictures, a tower for captions, and the scale of their similarities."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, max_pool2d, normalize

from allgrad.cli.demo.digits import VOCABULARY

if TYPE_CHECKING:
    from allgrad.cli.demo.digits import Digits

__all__ = ["Towers"]

_STROKES, _HIDDEN, _WIDTH = 12, 96, 32


class Towers(nn.Module):
    """Both towers in float64, with the same initial values everywhere; a bias for losses that take one."""

    def __init__(self, *, with_bias: bool) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.strokes = nn.Conv2d(1, _STROKES, 3, padding=1)
            self.picture = _tower(_STROKES * 4 * 4)
            self.words = nn.Embedding(len(VOCABULARY), _WIDTH, padding_idx=0)
            self.caption = _tower(_WIDTH)
        self.log_scale = nn.Parameter(torch.tensor(math.log(10)))
        self.bias = nn.Parameter(torch.tensor(-10.0)) if with_bias else None
        self.double()

    def forward(self, digits: Digits) -> tuple[Tensor, ...]:
        """Features of pictures and captions, the scale, and the bias if there is one."""
        features = (
            self.embed_pictures(digits.pictures),
            self.embed_captions(digits.tokens),
            self.log_scale.exp(),
        )
        return features if self.bias is None else (*features, self.bias)

    def embed_pictures(self, pictures: Tensor) -> Tensor:
        """Unit vectors of pictures."""
        strokes = max_pool2d(gelu(self.strokes(pictures.unflatten(1, (1, 8, 8)))), 2)
        return normalize(self.picture(strokes.flatten(1)), dim=-1)

    def embed_captions(self, tokens: Tensor) -> Tensor:
        """Unit vectors of captions."""
        return normalize(self.caption(self.words(tokens).sum(1)), dim=-1)

    @torch.no_grad()
    def similarities(self, pictures: Tensor, tokens: Tensor) -> Tensor:
        """The cosine of each picture (rows) and each caption (columns)."""
        return self.embed_pictures(pictures) @ self.embed_captions(tokens).T


def _tower(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, _HIDDEN), nn.GELU(), nn.Linear(_HIDDEN, _WIDTH))
