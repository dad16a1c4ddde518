"""What an encoder returns for each micro-batch, and all of it as the arguments of a loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from allgrad._core.torch_internals import below_view_tracking
from allgrad.losses._arguments.feature_checks import number

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Output", "find_scalars", "join", "split_gradients"]


class Output:
    """What the encoder returned: its tensors, and their names if it was a dict."""

    def __init__(self, returned: Any) -> None:
        self.names = list(returned) if isinstance(returned, dict) else None
        values = returned.values() if isinstance(returned, dict) else returned
        listed = [values] if isinstance(values, Tensor) else list(values)
        # A number is a scalar without a gradient.
        self.tensors: list[Tensor] = [number(x) for x in listed]

    def __str__(self) -> str:
        if self.names is not None:
            return ", ".join(map(repr, self.names))
        count = len(self.tensors)
        return f"{count} output{'' if count == 1 else 's'}"

    def is_like(self, other: Output) -> bool:
        return self.names == other.names and len(self.tensors) == len(other.tensors)

    def rows(self) -> set[int]:
        """The lengths of the embeddings: of all tensors that are surely not scalars."""
        return {len(x) for x in self.tensors if x.dim() > 1 and x.numel() != 1}

    def call(self, loss: Callable[..., Tensor]) -> Tensor:
        tensors = [_given(x) for x in self.tensors]
        if self.names is None:
            return loss(*tensors)
        return loss(**dict(zip(self.names, tensors, strict=True)))

    def backward(
        self, gradients: Sequence[Tensor | None], more: Sequence[tuple[Tensor, Tensor]] = ()
    ) -> None:
        """Run backward from the outputs with these gradients, and from ``more`` tensors with theirs."""
        pairs = [
            (x, g)
            for x, g in zip(self.tensors, gradients, strict=True)
            if g is not None and x.requires_grad
        ]
        pairs += more
        if pairs:
            torch.autograd.backward([x for x, _ in pairs], [g for _, g in pairs])


def find_scalars(outputs: Sequence[Output]) -> list[bool]:
    """Whether each tensor that the encoder returns is a scalar.

    A tensor of shape (1,) may also hold one value per row, as labels do. It is a scalar if the
    embeddings of some micro-batch have another number of rows.
    """
    other_rows = any(rows and 1 not in rows for rows in (output.rows() for output in outputs))
    return [
        all(x.dim() == 0 or (x.numel() == 1 and other_rows) for x in tensors)
        for tensors in zip(*(output.tensors for output in outputs), strict=True)
    ]


def join(outputs: Sequence[Output], is_scalar: Sequence[bool]) -> Output:
    """All outputs as one, with leaf tensors: embeddings joined, scalars of the last micro-batch."""
    last = outputs[-1]
    joined = [
        x.clone() if scalar else torch.cat([output.tensors[i] for output in outputs])
        for i, (x, scalar) in enumerate(zip(last.tensors, is_scalar, strict=True))
    ]
    leaves = [x.detach().requires_grad_(x.is_floating_point() or x.is_complex()) for x in joined]
    return Output(leaves if last.names is None else dict(zip(last.names, leaves, strict=True)))


def _given(leaf: Tensor) -> Tensor:
    """The leaf as the result of an encoder, which a loss may change in place."""
    given: Tensor = _Given.apply(leaf) if leaf.requires_grad else leaf  # type: ignore[no-untyped-call]
    return given


class _Given(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        with below_view_tracking():  # a view of a leaf could not be changed
            return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004
        return gradient


def split_gradients(
    joined: Output, outputs: Sequence[Output], is_scalar: Sequence[bool]
) -> list[list[Tensor | None]]:
    """The gradients of each micro-batch's output; the last one gets those of scalars."""
    by_tensor: list[Sequence[Tensor | None]] = []
    for i, (x, scalar) in enumerate(zip(joined.tensors, is_scalar, strict=True)):
        if x.grad is None:
            by_tensor.append([None] * len(outputs))
        elif scalar:
            by_tensor.append([torch.zeros_like(x)] * (len(outputs) - 1) + [x.grad])
        else:
            by_tensor.append(list(x.grad.split([len(output.tensors[i]) for output in outputs])))
    return [list(gradients) for gradients in zip(*by_tensor, strict=True)]
