"""What layers ask about the ranks of a group: their number, their facts, their shares of features."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn.modules.lazy import LazyModuleMixin

from allgrad._autograd.below_transforms import below_transforms
from allgrad._core.module_internals import forwards_of
from allgrad._wire import consistency
from allgrad._wire.groups import find_group
from allgrad._wire.primitives import resolve
from allgrad.collectives.all_gather import all_gather
from allgrad.errors import InputError, ModeError, SizesError, TensorError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from allgrad.types import GroupLike

__all__ = [
    "Place",
    "feature_sizes",
    "find_place",
    "gather_numbers",
    "refuse",
    "require_layer",
    "require_own_piece",
    "require_tensors",
]


class Place(NamedTuple):
    """The rank of this process in the group, and the number of its ranks."""

    rank: int
    world: int


def find_place(call: str, group: GroupLike) -> Place:
    """Resolve the group; an unknown one raises here."""
    found = resolve(call, group)
    return Place(found.rank, found.size)


def refuse(call: str, group: GroupLike, problem: InputError) -> NoReturn:
    """Raise what is wrong on this rank, before a collective of the layer.

    In checked mode the others, who come to that collective, raise too, and name this rank.
    """
    consistency.refuse(resolve(call, group), problem)


def require_tensors(call: str, group: GroupLike, **arguments: object) -> None:
    """Raise unless all of these are tensors."""
    for name, x in arguments.items():
        if not isinstance(x, Tensor):
            problem = f"{call}: {name} is {type(x).__name__}, not a tensor.\nGive a tensor."
            refuse(call, group, TensorError(problem))


def require_layer(ours: type[nn.Module], layer: object, plain: type[nn.Module]) -> None:
    """Raise unless ``ours`` can be made from this layer, which does what ``plain`` does and no more."""
    call, given = f"{ours.__name__}.from_plain", type(layer).__name__
    if not isinstance(layer, plain):
        raise InputError(
            f"{call}: takes an nn.{plain.__name__}, not {given}.\n"
            "Give the layer that it takes the place of."
        )
    if isinstance(layer, LazyModuleMixin):
        raise InputError(
            f"{call}: a {given} does not know its features yet.\n"
            "Run a batch through it before the call."
        )
    own_forward = forwards_of(type(layer)) not in {forwards_of(plain), forwards_of(ours)}
    if own_forward or _has_computed_parameters(layer):
        raise InputError(
            f"{call}: a {given} has a forward of its own, or parameters that are computed, "
            f"which a {ours.__name__} would leave out.\n"
            f"Replace it by an nn.{plain.__name__} and what it adds to one."
        )


def _has_computed_parameters(layer: nn.Module) -> bool:
    """Tell whether weight or bias is made of other parameters, as by weight_norm, new and old."""
    held = dict(layer.named_parameters(recurse=False))
    names = [name for name in ("weight", "bias") if getattr(layer, name, None) is not None]
    return any(name not in held for name in names)


def require_own_piece(
    call: str, group: GroupLike, sizes: Sequence[int], held: int, *, sends: bool = True
) -> None:
    """Raise unless a layer of these sizes, whose own piece has the length ``held``, is this rank's.

    ``sends`` tells whether the other ranks come to a collective of this layer.
    """
    found = find_group(call, group)
    if len(sizes) == found.size and sizes[found.rank] == held:
        return
    problem = SizesError(
        f"{call}: sizes={tuple(sizes)} and a piece of {held} do not fit rank {found.rank} of "
        f"{found.size}.\nMake the layer on every rank of its group, after init_process_group, or take "
        "it from the plain layer again."
    )
    if not sends:
        raise problem
    refuse(call, group, problem)


def gather_numbers(
    call: str, facts: Sequence[int], x: Tensor, group: GroupLike
) -> list[tuple[int, ...]]:
    """Give every rank the facts of all, in one small message. ``x`` names the device."""
    if find_place(call, group).world == 1:
        return [tuple(facts)]
    if torch.compiler.is_compiling():
        raise ModeError(
            f"{call}: under torch.compile the ranks cannot tell each other their sizes.\n"
            "Give sizes=, what each rank holds."
        )

    def gathered() -> list[list[int]]:
        row = torch.tensor([list(facts)], dtype=torch.int64, device=x.device)
        rows: list[list[int]] = all_gather(row, sizes="equal", group=group, grad="none").tolist()
        return rows

    return [tuple(found) for found in below_transforms(gathered)]


def feature_sizes(
    call: str, what: str, features: int, world: int, *, ragged: bool
) -> tuple[int, ...]:
    """How many features each rank holds. All ranks know the same numbers, so all of them raise."""
    if features % world and not ragged:
        raise SizesError(
            f"{call}: {what}={features} does not divide by {world} ranks.\n"
            "Choose another number, or ask for unequal pieces with ragged=True."
        )
    return tuple((features + world - 1 - rank) // world for rank in range(world))
