"""A collective as data: a linear map across ranks and its adjoint, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, TypeVar

from torch import Tensor

__all__ = ["HANDSHAKE", "MAKERS", "AdjointPair", "Ends", "Made", "Map", "makes_pair"]

Map: TypeAlias = Callable[[Sequence[Tensor]], Sequence[Tensor]]
Ends: TypeAlias = tuple[Sequence[int], Sequence[int]]
T = TypeVar("T", bound=Callable[..., Any])


class Made(NamedTuple):
    """How a pair was made: ``MAKERS[maker]`` makes it again from the call and the arguments.

    A compiled graph keeps this instead of the pair.
    """

    maker: str
    call: Any
    args: tuple[Any, ...]
    flipped: bool = False


@dataclass(slots=True, eq=False)
class AdjointPair:
    """A linear map ``A`` from all ranks' inputs to all ranks' outputs, and ``A*``.

    The two satisfy ``<A x, y> = <x, A* y>`` with inner products summed over ranks. That is all
    there is to a derivative: backward runs the adjoint, backward of backward runs the map again,
    forward mode runs the map on tangents.

    Both take tensors of one dtype and give as many, on every rank; they travel together. Inputs
    are left as they were. Dimensions are named from the front, so that a batch dimension may be
    appended at the end.
    """

    name: str
    adjoint_name: str
    forward: Map
    backward: Map
    made: Made | None = None
    _adjoint: AdjointPair | None = field(default=None, init=False, repr=False)

    @property
    def call(self) -> Any:
        """The call that the pair was made for; ``None`` if nothing is sent, in either direction."""
        made = self.made
        return None if made is None or made.call.size == 1 else made.call

    @property
    def adjoint(self) -> AdjointPair:
        """The same pair from the other side, made once."""
        if self._adjoint is None:
            made = self.made
            if made is not None:
                made = Made(made.maker, made.call, made.args, not made.flipped)
            # This one is not the other's: a cycle would keep both from ending.
            self._adjoint = AdjointPair(
                self.adjoint_name, self.name, self.backward, self.forward, made
            )
        return self._adjoint


class Maker(NamedTuple):
    """A function that makes pairs, and what it says of the tensors at both ends."""

    make: Callable[..., AdjointPair]
    ends: Callable[..., Ends] | None


# What ops in a graph call: those who make pairs, and the one who makes a size exchange.
MAKERS: dict[str, Maker] = {}
HANDSHAKE: list[Callable[..., Sequence[int]]] = []


def makes_pair(name: str, ends: Callable[..., Ends] | None = None) -> Callable[[T], T]:
    """Mark a function that makes a pair from a call, Partitions and then whole numbers.

    ``ends(call, *args)`` gives the lengths of the tensors along their cut dims, before and after
    the map; without it a map keeps shapes. The pair says ``Made(name, call, args)`` of itself.
    Nothing else is needed to trace a call.
    """

    def register(make: T) -> T:
        MAKERS[name] = Maker(make, ends)
        return make

    return register
