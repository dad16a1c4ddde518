"""Gradients that DDP gets in its last pass, which waits for one of every parameter.

A parameter that only the loss uses would have its gradient before that pass, and none in it: DDP would
wait for it until the next step, and synchronise nothing. DDP that looks for unused parameters does not
wait.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["LateGradients"]


class LateGradients:
    """A block around the backward of a loss: what it gives to DDP's parameters is put off."""

    def __init__(self, wrapped: Sequence[Any]) -> None:
        self.waiting = [m for m in wrapped if getattr(m, "find_unused_parameters", None) is False]
        self.found: dict[Tensor, Tensor] = {}  # gradients by parameter

    def __enter__(self) -> Self:
        parameters = {p for m in self.waiting for p in m.parameters() if p.requires_grad}
        self.hooks = [p.register_hook(partial(self._put_off, p)) for p in parameters]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _put_off(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        before = self.found.get(parameter)
        self.found[parameter] = gradient if before is None else before + gradient
        return torch.zeros_like(gradient)

    def complete(
        self, outputs: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        """Zeros for outputs that the loss did not use: their parameters are waited for too."""
        if not self.waiting:
            return gradients
        pairs = zip(outputs, gradients, strict=True)
        return [torch.zeros_like(x) if g is None and x.requires_grad else g for x, g in pairs]
