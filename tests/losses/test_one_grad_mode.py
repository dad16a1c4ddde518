"""A loss without grad mode on one rank only: every rank raises in forward, where others would wait in backward."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch

from allgrad.errors import InputError
from losses.test_devices import CALLS
from refusals import raises_everywhere

LOSSES = [name for name in CALLS if name != "push"]


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.ranks(3)
def test_grad_mode_off_on_one_rank_raises_on_all(rank, world, name, without):
    call, good, _ = CALLS[name]
    leaf = good[0].clone().requires_grad_()
    right = partial(call, leaf, *good[1:])

    def wrong():
        with without() if rank == 1 else nullcontext():
            return right()

    for calls in (0, 5):  # after some calls another one is expected
        for _ in range(calls):
            right().backward()
        raises_everywhere(InputError, wrong, "grad mode", "rank 1: ", "grad mode is off")
    with torch.no_grad():
        assert not right().requires_grad
    right().backward()
