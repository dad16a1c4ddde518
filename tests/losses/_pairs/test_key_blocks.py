"""The ring: the transfer of a block overlaps with the computation on the block before it."""

import threading

import pytest
import torch

from allgrad._wire import primitives as wire
from allgrad.losses import clip_loss, reference
from allgrad.losses._tiles.torch import Tiles
from losses.pairs import PAIRS, batch

TIMEOUT = 20


class Overlap:
    """Requires overlap: a message may end only after a computation has begun, and the reverse.

    ``schedule`` lists for each computation, in order, the numbers of the messages that must overlap
    with it. If they ran one after the other, in either order, the first would time out.
    """

    def __init__(self, monkeypatch, schedule):
        self.schedule = list(schedule)
        scheduled = [number for numbers in self.schedule for number in numbers]
        self.begun = {number: threading.Event() for number in scheduled}
        self.released = {number: threading.Event() for number in scheduled}
        self.messages = self.computations = 0
        real = wire.all_to_all

        def message(*args, **options):
            number = self.messages
            self.messages += 1
            if number in self.begun:
                self.begun[number].set()
                assert self.released[number].wait(TIMEOUT), (
                    f"message {number} overlaps with no computation"
                )
            return real(*args, **options)

        monkeypatch.setattr(wire, "all_to_all", message)
        for name in ("lse", "add_gradients"):
            monkeypatch.setattr(Tiles, name, self.computing(getattr(Tiles, name)))

    def computing(self, real):
        def compute(*args, **options):
            for number in self.schedule[self.computations]:
                assert self.begun[number].wait(TIMEOUT), f"message {number} had not begun"
                self.released[number].set()
            self.computations += 1
            return real(*args, **options)

        return compute


@pytest.mark.ranks(3)
def test_next_block_is_under_way_while_this_one_is_computed(rank, world):
    counts = PAIRS["ragged"][:world]
    wanted = batch("clip", counts)
    want = reference.clip(*wanted)
    want.backward()
    given = batch("clip", counts, rank)

    with pytest.MonkeyPatch.context() as patch:
        forward = Overlap(patch, [(0,), (1,), ()])
        got = clip_loss(*given, ring=True)
    assert forward.computations == world
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-14)

    # In order: the keys of block 1, the sums of block 0 and the keys of block 2, the sums of block 1.
    # The last message, the complete sums, overlaps with nothing.
    with pytest.MonkeyPatch.context() as patch:
        backward = Overlap(patch, [(0,), (1, 2), (3,)])
        got.backward()
    assert (backward.computations, backward.messages) == (world, 5)
    for x, whole in zip(given[:2], wanted[:2], strict=True):
        own = world * whole.grad.split(list(counts))[rank]
        torch.testing.assert_close(x.grad, own, rtol=1e-10, atol=1e-14)
