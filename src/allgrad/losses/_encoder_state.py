"""What encoding a batch reads and changes beside it: buffers and random numbers."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from allgrad._core.module_internals import own_buffers

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

__all__ = ["kept_buffers", "random_devices", "random_state", "set_random_state"]


@contextmanager
def kept_buffers(modules: Sequence[nn.Module]) -> Iterator[None]:
    """A block, at whose end the buffers of modules are set back, also after an error."""
    owners = {owner: None for module in modules for owner in module.modules()}
    named_of = [(owner, own_buffers(owner)) for owner in owners]
    buffers = {id(b): b for _, named in named_of for b in named.values() if b is not None}
    values = [(b, b.detach().clone()) for b in buffers.values() if _can_change(b)]
    try:
        yield
    finally:
        for owner, named in named_of:
            for name in own_buffers(owner).keys() - named.keys():
                delattr(owner, name)
            for name, buffer in named.items():
                setattr(owner, name, buffer)
        for buffer, value in values:
            # As data: a graph that needs this buffer need not know that it changed and is as it was.
            buffer.data.copy_(value)


def _can_change(buffer: Tensor) -> bool:
    """Whether torch would write to it here: not if its elements share memory, or it is of inference mode."""
    if buffer.is_inference():
        return False
    if buffer.layout is not torch.strided:
        return True
    lengths = zip(buffer.shape, buffer.stride(), strict=True)
    return all(stride or length <= 1 for length, stride in lengths)


def random_devices() -> list[int]:
    """The CUDA devices whose random numbers an encoder may use."""
    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []


def random_state(devices: Sequence[int]) -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in devices)]


def set_random_state(devices: Sequence[int], states: Sequence[Tensor]) -> None:
    torch.set_rng_state(states[0])
    for device, state in zip(devices, states[1:], strict=True):
        torch.cuda.set_rng_state(state, device)
