"""A collective as data: a linear map across ranks and its adjoint, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor

__all__ = ["AdjointPair", "Map"]

Map: TypeAlias = Callable[[Sequence[Tensor]], Sequence[Tensor]]


@dataclass(slots=True, eq=False)
class AdjointPair:
    """A linear map ``A`` from all ranks' inputs to all ranks' outputs, and ``A*``.

    The two satisfy ``<A x, y> = <x, A* y>`` with inner products summed over ranks. That is all
    there is to a derivative: backward runs the adjoint, backward of backward runs the map again,
    forward mode runs the map on tangents.

    Both take tensors of one dtype and give as many, on every rank; they travel together. Inputs
    are left as they were. Dimensions are named from the front, so that a batch dimension may be
    appended at the end.

    A compiler differentiates the ops that a map is made of. Where those are not each other's
    adjoints, as with ``grad="same"``, ``traced`` has the two maps made of ops that are.
    """

    name: str
    adjoint_name: str
    forward: Map
    backward: Map
    traced: tuple[Map, Map] | None = None
    _adjoint: AdjointPair | None = field(default=None, init=False, repr=False)

    @property
    def adjoint(self) -> AdjointPair:
        """The same pair from the other side, made once."""
        if self._adjoint is None:
            traced = None if self.traced is None else (self.traced[1], self.traced[0])
            # This one is not the other's: a cycle would keep both from ending.
            self._adjoint = AdjointPair(
                self.adjoint_name, self.name, self.backward, self.forward, traced
            )
        return self._adjoint
