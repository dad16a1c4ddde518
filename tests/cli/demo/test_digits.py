"""The demo's pictures and captions."""

import torch

from allgrad.cli.demo import digits


def test_all_pictures_are_there_once():
    learn, held_out = digits.load()
    assert (len(learn), len(held_out)) == (1498, 299)
    assert learn.pictures.shape == (1498, 64)
    assert learn.pictures.dtype == torch.float64
    assert (float(learn.pictures.min()), float(learn.pictures.max())) == (0.0, 1.0)
    assert torch.cat([learn.labels, held_out.labels]).bincount().tolist() == [
        178, 182, 177, 183, 181, 182, 181, 179, 174, 180,
    ]  # fmt: skip


def test_captions_tell_the_digit():
    for part in digits.load():
        named = [[digits.VOCABULARY[word] for word in row if word] for row in part.tokens.tolist()]
        for words, label in zip(named, part.labels.tolist(), strict=True):
            assert [w for w in words if w in digits.NAMES] == [digits.NAMES[label]]


def test_captions_tell_strokes_and_lean():
    upright, slash, dot = torch.zeros(3, 8, 8, dtype=torch.float64)
    upright[1:7, 3:5] = 1
    slash[range(8), range(7, -1, -1)] = 1
    dot[range(8), range(8)] = 1
    images = torch.stack([upright, slash, dot, upright, slash, dot])
    assert digits._slant(images)[:3].sign().tolist() == [0, 1, -1]
    captions = digits.captions(images, torch.arange(6))
    assert captions[0] == "a handwritten zero"
    assert captions[2] == "a handwritten two leaning left"
    assert captions[3] == "a bold three leaning upright"
