"""The types in the signatures of allgrad, for annotations in your own code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias, TypeVar

from allgrad._autograd.async_calls import Handle
from allgrad._core.reductions import Reduction
from allgrad._wire.groups import GroupLike, ReduceOpLike

__all__ = ["Grad", "GroupLike", "Handle", "Nest", "Op", "Reduction", "Sizes", "SumOrNone"]

# A tensor, or any nest of dicts, lists, tuples, named tuples and dataclasses of tensors.
Nest = TypeVar("Nest")
# The meaning of a gradient: docs/collectives.md.
Grad: TypeAlias = Literal["sum", "same", "none"]
SumOrNone: TypeAlias = Literal["sum", "none"]
# Found out, promised to be equal, or given by rank.
Sizes: TypeAlias = Sequence[int] | Literal["equal"] | None
Op: TypeAlias = Literal["sum", "mean", "prod", "min", "max", "logsumexp"] | ReduceOpLike
