"""Pictures of handwritten digits, and captions for them.

The pictures are real (``digits.txt`` names the source). The captions describe them: always the
digit, sometimes the thickness of its strokes, sometimes the direction in which it leans.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["NAMES", "VOCABULARY", "Digits", "captions", "load", "plain_captions", "tokens"]

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

_PAD = ""
_STROKES = ("thin", "even", "bold")
_LEANS = ("left", "upright", "right")
VOCABULARY = (_PAD, "a", "handwritten", "leaning", *_STROKES, *_LEANS, *NAMES)


@dataclass(frozen=True, slots=True)
class Digits:
    """Pictures (n, 64) from 0 to 1 in float64, the digit of each, and its caption in numbers."""

    pictures: Tensor
    labels: Tensor
    tokens: Tensor

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, which: slice | Tensor) -> Digits:
        return Digits(self.pictures[which], self.labels[which], self.tokens[which])


def load(device: torch.device | str = "cpu") -> tuple[Digits, Digits]:
    """The training set, and the held-out set: every sixth picture."""
    with resources.files("allgrad.cli.demo").joinpath("digits.npz").open("rb") as file:
        stored = np.load(file, allow_pickle=False)
        images, labels = (torch.from_numpy(stored[name]) for name in ("images", "labels"))
    images, labels = images.double() / 16, labels.long()
    numbers = tokens(captions(images, labels))
    everything = Digits(*(t.to(device) for t in (images.flatten(1), labels, numbers)))
    held_out = torch.arange(len(labels)) % 6 == 5
    return everything[~held_out], everything[held_out]


def captions(images: Tensor, labels: Tensor) -> list[str]:
    """A caption for each picture: one in four is plain, the others name strokes, lean, or both."""
    made = []
    words = zip(labels.tolist(), _thirds(_ink(images)), _thirds(_slant(images)), strict=True)
    for index, (label, stroke, lean) in enumerate(words):
        stroke_word = _STROKES[stroke] if index & 1 else "handwritten"
        lean_words = f" leaning {_LEANS[lean]}" if index & 2 else ""
        made.append(f"a {stroke_word} {NAMES[label]}{lean_words}")
    return made


def plain_captions() -> list[str]:
    """Ten captions that name the digit only."""
    return [f"a handwritten {name}" for name in NAMES]


def tokens(sentences: Sequence[str]) -> Tensor:
    """The words of each caption as numbers, (sentences, longest), padded with 0."""
    numbers = {word: number for number, word in enumerate(VOCABULARY)}
    rows = [[numbers[word] for word in sentence.split()] for sentence in sentences]
    longest = max(map(len, rows))
    return torch.tensor([row + [0] * (longest - len(row)) for row in rows])


def _thirds(values: Tensor) -> list[int]:
    """0, 1 or 2 for each value: the third of all values that it belongs to."""
    cuts = values.quantile(torch.tensor([1 / 3, 2 / 3], dtype=values.dtype))
    thirds: list[int] = torch.bucketize(values, cuts).tolist()
    return thirds


def _ink(images: Tensor) -> Tensor:
    return images.mean((1, 2))


def _slant(images: Tensor) -> Tensor:
    """How far the ink shifts to the right for each row upwards."""
    steps = torch.arange(8, dtype=images.dtype)
    weight = images / images.sum((1, 2), keepdim=True)
    x = steps - (weight.sum(1) * steps).sum(1, keepdim=True)
    y = (weight.sum(2) * steps).sum(1, keepdim=True) - steps
    across = torch.einsum("nyx,ny,nx->n", weight, y, x)
    return across / torch.einsum("nyx,ny,ny->n", weight, y, y)
