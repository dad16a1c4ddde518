"""Parameters that the loss itself uses, beside the outputs of an encoder.

DDP waits in its last pass for a gradient of each parameter. A parameter that only the loss uses has its gradient before that pass, and none in it: DDP would wait for
it until the next step, and synchronise nothing. So in the last pass it gets another one, of zero, and DDP
sends what has been added up. DDP that looks for unused parameters does not wait.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

__all__ = ["LossParameters", "uses_others"]


class LossParameters:
    """A block around the backward of a loss: notes which parameters of DDP modules get a gradient."""

    def __init__(self, wrapped: Sequence[Any]) -> None:
        waits = [m for m in wrapped if getattr(m, "find_unused_parameters", None) is False]
        self.waited_for = {p for m in waits for p in m.parameters() if p.requires_grad}
        self.used: set[Tensor] = set()

    def __enter__(self) -> Self:
        self.hooks = [p.register_hook(partial(self._note, p)) for p in self.waited_for]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _note(self, parameter: Tensor, _: Tensor) -> None:
        self.used.add(parameter)

    def zeros(self) -> list[tuple[Tensor, Tensor]]:
        """The parameters that the loss used, with gradients of zero."""
        return [(p, torch.zeros_like(p)) for p in self.used]

    def complete(
        self, outputs: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        """Zeros for outputs that the loss did not use: their parameters are waited for too."""
        if not self.waited_for:
            return gradients
        pairs = zip(outputs, gradients, strict=True)
        return [torch.zeros_like(x) if g is None and x.requires_grad else g for x, g in pairs]


def uses_others(value: Tensor, arguments: Iterable[Tensor]) -> bool:
    """Whether the value of a loss depends on a leaf that requires grad beside these arguments."""
    known = set(map(id, arguments))
    nodes = [] if value.grad_fn is None else [value.grad_fn]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        leaf = getattr(node, "variable", None)
        # An anchor of ours has no element.
        if isinstance(leaf, torch.Tensor) and id(leaf) not in known and leaf.numel():
            return True
        before = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= before
        nodes += before
    return False
