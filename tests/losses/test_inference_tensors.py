"""Tensors that were made in inference mode, as by a frozen encoder, serve a loss outside of it."""

import pytest
import torch

from losses.test_devices import CALLS

LOSSES = [name for name in CALLS if name != "push"]


def differentiable(x):
    return isinstance(x, torch.Tensor) and x.is_floating_point()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.ranks(1, 2)
def test_every_other_tensor_was_made_in_inference_mode(rank, world, name):
    call, plain, _ = CALLS[name]
    with torch.inference_mode():
        given = [x + 0 if isinstance(x, torch.Tensor) else x for x in plain]
    for place, x in enumerate(plain):
        if not differentiable(x):
            continue
        found = []
        for others in (plain, given):
            own = (x / 3).requires_grad_()
            value = call(*others[:place], own, *others[place + 1 :])
            value.backward()
            found.append((value.detach(), own.grad))
        torch.testing.assert_close(*found, rtol=0, atol=0)
