"""The ring: a block is on its way while the one before it is computed with."""

import threading

import pytest
import torch

from allgrad._wire import primitives as wire
from allgrad.losses import clip_loss, reference
from allgrad.losses._tiles.torch import Tiles
from losses.pairs import PAIRS, batch

PATIENCE = 20


class Meetings:
    """Lets no message and no computation end before the other has begun, where they should meet.

    ``schedule`` says for each computation, in order, the numbers of the messages that it meets.
    Taking turns, in whichever order, one of them would wait for the other in vain.
    """

    def __init__(self, monkeypatch, schedule):
        self.schedule = list(schedule)
        met = [number for numbers in self.schedule for number in numbers]
        self.begun = {number: threading.Event() for number in met}
        self.released = {number: threading.Event() for number in met}
        self.messages = self.computations = 0
        move = wire.all_to_all

        def message(*args, **options):
            number = self.messages
            self.messages += 1
            if number in self.begun:
                self.begun[number].set()
                assert self.released[number].wait(PATIENCE), f"message {number} met nobody"
            return move(*args, **options)

        monkeypatch.setattr(wire, "all_to_all", message)
        for name in ("lse", "add_gradients"):
            monkeypatch.setattr(Tiles, name, self.computing(getattr(Tiles, name)))

    def computing(self, real):
        def compute(*args, **options):
            for number in self.schedule[self.computations]:
                assert self.begun[number].wait(PATIENCE), f"message {number} was not under way"
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
        forward = Meetings(patch, [(0,), (1,), ()])
        got = clip_loss(*given, ring=True)
    assert forward.computations == world
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-14)

    # Keys of the next block, then sums of the last one and keys of the next, and so on; the sums
    # that are complete go home alone.
    with pytest.MonkeyPatch.context() as patch:
        backward = Meetings(patch, [(0,), (1, 2), (3,)])
        got.backward()
    assert (backward.computations, backward.messages) == (world, 5)
    for x, whole in zip(given[:2], wanted[:2], strict=True):
        own = world * whole.grad.split(list(counts))[rank]
        torch.testing.assert_close(x.grad, own, rtol=1e-10, atol=1e-14)
