"""Gradient caching: a batch larger than the encoder's activations allow."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from allgrad.collectives.all_gather import gather_sizes
from allgrad.errors import InputError, rank_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

    from allgrad._wire.primitives import GroupLike

__all__ = ["cached_step"]

Batch = TypeVar("Batch")


def cached_step(
    encode: Callable[[Batch], Any],
    micro_batches: Sequence[Batch],
    loss: Callable[..., Tensor],
    *,
    models: Sequence[nn.Module] = (),
    backward: Callable[[Tensor], object] = Tensor.backward,
    group: GroupLike = None,
) -> Tensor:
    """Do what ``loss(encode(batch)).backward()`` does, with the activations of one micro-batch.

        1. encode each micro-batch without a graph          [ a ] [ b ] [ c ]
        2. the loss of all embeddings, of all ranks          loss(a b c)  --->  A B C
        3. encode each again, now with its gradient          [ a ] <- A   [ b ] <- B   [ c ] <- C

    ``encode`` gives a tensor, or a tuple, list or dict of them, which ``loss`` then takes as its
    arguments: embeddings, joined along their first dimension, and numbers such as a learned scale,
    which are taken from the last micro-batch. Random numbers are replayed, so that dropout drops
    the same in 3 as in 1. What depends on the batch it sees, as batch norm does, sees micro-batches.

    ``models`` are those that ``encode`` runs under DDP (``encode`` itself is found): gradients are
    synchronised once, in the last micro-batch. Ranks may have different numbers of micro-batches
    of any sizes, at least one each, if only an empty one. ``group`` is that of the loss: its ranks
    first tell each other how many they have, so that one without any raises on all.

    ``backward`` runs the backward of 2, ``lambda loss: scaler.scale(loss).backward()`` for a loss
    that is scaled. Gradients are added to ``.grad``; the loss is returned without a graph.

    Cost: one more forward of the encoder, and one size exchange.
    """
    _require_some(len(micro_batches), group)
    wrapped = [m for m in (encode, *models) if hasattr(m, "no_sync")]
    devices = _devices()
    states, outputs = [], []
    with torch.no_grad(), _unsynchronised(wrapped):
        for batch in micro_batches:
            states.append(_random_state(devices))
            outputs.append(_Output(encode(batch)))

    joined = outputs[-1].join(outputs)
    value = joined.feed(loss)
    backward(value)
    gradients = joined.gradients([output.rows() for output in outputs])

    last = len(micro_batches) - 1
    with torch.random.fork_rng(devices):
        for number, batch in enumerate(micro_batches):
            with _unsynchronised(wrapped if number < last else []):
                _set_random_state(devices, states[number])
                again = _Output(encode(batch))
                again.backward(gradients[number])
    return value.detach()


def _require_some(count: int, group: GroupLike) -> None:
    # A group of NCCL alone carries nothing that is on the host.
    device = "cuda" if torch.cuda.is_initialized() else "cpu"
    counts: tuple[int, ...] = gather_sizes(torch.empty(count, 0, device=device), group=group)
    marks = {rank: "no micro-batch" for rank, count in enumerate(counts) if not count}
    if marks:
        raise InputError(
            rank_table(
                "cached_step: each rank has a micro-batch.",
                [f"{count} micro-batches" for count in counts],
                marks,
                "Give each rank one, if only an empty one.",
            )
        )


class _Output:
    """What an encoder gave: its tensors, and how they are passed on."""

    def __init__(self, given: Any) -> None:
        self.names = list(given) if isinstance(given, dict) else None
        values = given.values() if isinstance(given, dict) else given
        self.tensors: list[Tensor] = [values] if isinstance(values, Tensor) else list(values)

    def rows(self) -> list[int | None]:
        """How many rows each tensor has; none is for a number."""
        return [len(x) if x.dim() else None for x in self.tensors]

    def join(self, outputs: Sequence[_Output]) -> _Output:
        """All outputs as one of leaves; numbers are taken from here."""
        joined = [
            torch.cat([output.tensors[i] for output in outputs]) if x.dim() else x.clone()
            for i, x in enumerate(self.tensors)
        ]
        leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in joined]
        return _Output(leaves if self.names is None else dict(zip(self.names, leaves, strict=True)))

    def feed(self, loss: Callable[..., Tensor]) -> Tensor:
        if self.names is None:
            return loss(*self.tensors)
        return loss(**dict(zip(self.names, self.tensors, strict=True)))

    def gradients(self, rows: list[list[int | None]]) -> list[list[Tensor | None]]:
        """Cut the gradients for the outputs they are joined of; a number's goes to the last."""
        by_tensor: list[Sequence[Tensor | None]] = []
        for x, counts in zip(self.tensors, zip(*rows, strict=True), strict=True):
            if x.grad is None:
                by_tensor.append([None] * len(counts))
            elif x.dim():
                by_tensor.append(list(x.grad.split([n for n in counts if n is not None])))
            else:
                by_tensor.append([torch.zeros_like(x)] * (len(counts) - 1) + [x.grad])
        return [list(of_output) for of_output in zip(*by_tensor, strict=True)]

    def backward(self, gradients: Sequence[Tensor | None]) -> None:
        pairs = [
            (x, g)
            for x, g in zip(self.tensors, gradients, strict=True)
            if g is not None and x.requires_grad
        ]
        if pairs:
            torch.autograd.backward([x for x, _ in pairs], [g for _, g in pairs])


@contextmanager
def _unsynchronised(wrapped: Sequence[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for module in wrapped:
            stack.enter_context(module.no_sync())
        yield


def _devices() -> list[int]:
    """The CUDA devices whose random numbers an encoder may draw."""
    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []


def _random_state(devices: Sequence[int]) -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in devices)]


def _set_random_state(devices: Sequence[int], states: Sequence[Tensor]) -> None:
    torch.set_rng_state(states[0])
    for device, state in zip(devices, states[1:], strict=True):
        torch.cuda.set_rng_state(state, device)
