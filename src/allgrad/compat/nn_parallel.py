"""The functions of ``torch.nn.parallel`` between the devices of one process, on CPU devices too.

A program changes its import line and keeps its calls::

    from torch.nn.parallel._functions import Broadcast, Gather, ReduceAddCoalesced, Scatter
    from torch.nn.parallel.scatter_gather import gather, scatter, scatter_kwargs

become::

    from allgrad.compat.nn_parallel import Broadcast, Gather, ReduceAddCoalesced, Scatter
    from allgrad.compat.nn_parallel import gather, scatter, scatter_kwargs

Two things differ, where the originals are silently wrong: tensors of one call that would be split
into different numbers of chunks raise, instead of losing the last chunks; and a batch that is a
dataclass is split like any other nest, instead of being given whole to every device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from allgrad import devices
from allgrad.containers.call_arguments import scatter_call
from allgrad.containers.kinds import nodes
from allgrad.containers.nests import flatten, unflatten
from allgrad.errors import InputError, PieceMismatch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from allgrad.devices import Device

__all__ = [
    "Broadcast",
    "Gather",
    "ReduceAddCoalesced",
    "Scatter",
    "gather",
    "scatter",
    "scatter_kwargs",
]


class Broadcast:
    """Copies of the inputs on every device, one device after another."""

    @staticmethod
    def apply(target_gpus: Sequence[Device], *inputs: Tensor) -> tuple[Tensor, ...]:
        targets = [_device(gpu) for gpu in target_gpus]
        return tuple(x for copies in devices.broadcast(inputs, targets) for x in copies)


class ReduceAddCoalesced:
    """Sums over the devices; ``grads`` lists ``num_inputs`` tensors of one device after another."""

    @staticmethod
    def apply(destination: Device | None, num_inputs: int, *grads: Tensor) -> tuple[Tensor, ...]:
        if num_inputs < 1 or len(grads) % num_inputs:
            raise InputError(
                f"ReduceAddCoalesced: {len(grads)} tensors are not a multiple of {num_inputs}.\n"
                "Give num_inputs tensors for every device."
            )
        groups = [grads[i : i + num_inputs] for i in range(0, len(grads), num_inputs)]
        return devices.reduce_add(groups, _device(destination))


class Gather:
    """The inputs joined along ``dim`` on one device; scalars become a vector."""

    @staticmethod
    def apply(target_device: Device | None, dim: int, *inputs: Tensor) -> Tensor:
        return devices.gather(inputs, _device(target_device), dim=dim)


class Scatter:
    """The input split along ``dim``: into ``chunk_sizes``, or as ``torch.chunk`` does.

    Without ``chunk_sizes``, a short input gives fewer chunks than there are devices.
    """

    @staticmethod
    def apply(
        target_gpus: Sequence[Device],
        chunk_sizes: Sequence[int] | None,
        dim: int,
        input: Tensor,  # noqa: A002
    ) -> tuple[Tensor, ...]:
        targets = [_device(gpu) for gpu in target_gpus]
        if chunk_sizes is None and targets and isinstance(input, Tensor) and input.dim():
            chunk_sizes = [c.shape[dim] for c in input.detach().chunk(len(targets), dim)]
            targets = targets[: len(chunk_sizes)]
        return tuple(devices.scatter(input, targets, sizes=chunk_sizes, dim=dim))


def scatter(inputs: Any, target_gpus: Sequence[Device], dim: int = 0) -> Any:
    """The pieces of a tensor, as a tuple; or a list with a nest of pieces for each device."""
    if isinstance(inputs, Tensor):
        return Scatter.apply(target_gpus, None, dim, inputs)
    calls, _ = _calls((inputs,), None, target_gpus, dim)
    return [nest for (nest,) in calls]


def scatter_kwargs(
    inputs: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    target_gpus: Sequence[Device],
    dim: int = 0,
) -> tuple[tuple[tuple[Any, ...], ...], tuple[dict[str, Any], ...]]:
    """The arguments of one call, split into those of a call for each device; ``()`` if there are none."""
    if not inputs and not kwargs:
        return (), ()
    return _calls(inputs, kwargs, target_gpus, dim)


def gather(outputs: Sequence[Any], target_device: Device | None, dim: int = 0) -> Any:
    """One nest from the devices' nests, their tensors joined along ``dim``; None stays None."""
    flattened = [flatten(output) for output in outputs]
    if not flattened:
        raise InputError("gather: outputs is empty.\nGive one output for each device.")
    structure = flattened[0][1]
    if any(isinstance(node, PackedSequence) for node in nodes(list(outputs))):
        raise InputError(
            "gather: a PackedSequence cannot be joined: its rows belong to several sequences.\n"
            "Return it padded, with pad_packed_sequence."
        )
    for i, (leaves, other) in enumerate(flattened):
        if other != structure:
            raise PieceMismatch(
                f"gather: all outputs must have the same structure.\n  0: {structure}\n"
                f"  {i}: {other}   <- differs from 0\nReturn the same containers on every device."
            )
        for leaf in leaves:
            if leaf is not None and not isinstance(leaf, Tensor):
                raise InputError(
                    f"gather: output {i} holds a {type(leaf).__name__}; only tensors are joined.\n"
                    "Return it as a tensor."
                )
    joined = [
        None if all(leaf is None for leaf in leaves) else Gather.apply(target_device, dim, *leaves)
        for leaves in zip(*(leaves for leaves, _ in flattened), strict=True)
    ]
    return unflatten(structure, joined)


def _calls(
    args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, target_gpus: Sequence[Device], dim: int
) -> tuple[tuple[tuple[Any, ...], ...], tuple[dict[str, Any], ...]]:
    def split(x: Tensor) -> tuple[Tensor, ...]:
        return Scatter.apply(target_gpus, None, dim, x)

    return scatter_call(args, kwargs, split, parts=len(target_gpus))


def _device(device: Device | None) -> Device:
    """The device that torch means: None is the current accelerator, -1 the CPU."""
    if device is None:
        return torch.accelerator.current_accelerator(check_available=True) or "cpu"
    return "cpu" if device == -1 else device
