"""The kinds of contrastive loss."""

from __future__ import annotations

from enum import Enum
from typing import Literal, TypeAlias

__all__ = ["Activation", "LossKind"]

# Of losses over rows: what makes a row's loss of its scores.
Activation: TypeAlias = Literal["pairs", "softmax", "sigmoid"]


class LossKind(Enum):
    """What is computed from the score matrix, whose rows are queries and whose columns are keys."""

    SOFTMAX_ROWS = "softmax along rows"
    SOFTMAX_BOTH = "softmax along rows and along columns"
    SIGMOID = "sigmoid of each score"

    __hash__ = object.__hash__  # that of Enum is a call in Python

    @property
    def directions(self) -> int:
        """How many terms of the loss each pair has."""
        return 2 if self is LossKind.SOFTMAX_BOTH else 1
