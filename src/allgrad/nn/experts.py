"""Mixtures of experts: tokens to the ranks of their experts, and back."""

from __future__ import annotations

from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING

import numpy as np
import torch

from allgrad._autograd.transforms import apply
from allgrad._core.partition import even
from allgrad._wire.calls import describe_shapes
from allgrad._wire.primitives import resolve
from allgrad.errors import InputError, PieceMismatch, SizesError, rank_table
from allgrad.nn._ranks import Place, refuse, require_tensors
from allgrad.nn._routes import Route
from allgrad.nn._routing import Options, choices_in_order, exchange_counts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from allgrad.nn._routes import Counts
    from allgrad.types import GroupLike

__all__ = ["Dispatched", "combine", "dispatch"]


@dataclass(frozen=True, slots=True)
class Dispatched:
    """Tokens at their experts, and what ``combine`` needs for the way back."""

    tokens: Tensor  # by expert, then by the rank they come from, then in that rank's order
    counts: tuple[int, ...]  # tokens of each own expert
    experts: range  # the own experts
    dropped: int  # choices of this rank that found no room
    shape: torch.Size  # of routing
    route: Route
    group: GroupLike


def dispatch(
    x: Tensor,
    routing: Tensor,
    *,
    experts: int | Sequence[int],
    capacity: int | None = None,
    drop: bool = True,
    group: GroupLike = None,
) -> Dispatched:
    """Send each token to the ranks of the experts that it is routed to.

        rank 0   tokens [ a b ]     routing [ 0 2 ]         expert 0: [ a d ]
        rank 1   tokens [ c ]       routing [ 2 ]     --->  expert 1: [ e ]
        rank 2   tokens [ d e f ]   routing [ 0 1 2 ]       expert 2: [ b c f ]

    ``x`` are this rank's tokens (T, D), any number; ``routing`` (T) or (T, k) are the experts that
    each chooses, -1 for none. ``experts`` is their number, which the ranks divide, or how many
    each rank holds. Rank 0 holds the first ones. ``capacity`` is the most that an expert takes
    of all ranks together, in rank order and then in the tokens' order; what finds no room is
    dropped, or raises with ``drop=False``.

    The result has ``tokens`` and their ``counts`` by own expert: ``tokens.split(counts)``.

    Gradient: the way back, exact to any order; a token's gradient is the sum over its choices.
    A token is used only where it was sent, so there is no ``grad=`` to choose.

    Cost: one collective each way, and one small message of as many numbers as there are experts, which
    are read on the host. ``combine`` needs no further message for sizes. Over Gloo, with up to 8 ranks
    on one host and no ``capacity``, up to 128 KiB for each rank travel with the numbers; large blocks
    travel each to its place; elsewhere one copy puts rows in order of experts.
    """
    if torch.compiler.is_compiling():  # the counts are read on the host: a graph break
        from allgrad._autograd import graph_breaks

        options = {"experts": experts, "capacity": capacity, "drop": drop, "group": group}
        sent: Dispatched = graph_breaks.run_routing(dispatch, x, routing, **options)
        return sent
    require_tensors("dispatch", group, x=x, routing=routing)
    call = resolve("dispatch", group, lambda: describe_shapes([x], 0))
    place = Place(call.rank, call.size)
    held = _held_by_rank(experts, place.world, group)
    _check_capacity(capacity, group)
    found = choices_in_order(x, routing, sum(held))
    same = Options(held, capacity, drop)
    counts, arrived = exchange_counts(call, x, routing, same, found, group)
    slots, own, dropped = found.order, counts[place.rank], 0
    if not isinstance(found.counts, list):
        slots = slots[: int(own.sum())]
    if capacity is not None:
        kept = _with_room(counts, capacity, drop)
        dropped = slots.shape[0] - int(kept[place.rank].sum())
        if dropped:
            slots = slots[_first_of_each(own, kept[place.rank]).to(slots.device)]
        counts = kept
    choices = routing.shape[1] if routing.dim() == 2 else 1
    route = Route(slots, (x.shape[0], max(1, choices)), counts, held, place)
    route.arrived = arrived
    (tokens,) = apply(route.pair(call), [x])
    return Dispatched(tokens, route.counts, route.experts, dropped, routing.shape, route, group)


def _held_by_rank(experts: int | Sequence[int], world: int, group: GroupLike) -> tuple[int, ...]:
    """How many experts each rank holds."""
    if isinstance(experts, (int, np.integer)):
        held = even(int(experts), world)
        if experts % world:
            problem = SizesError(
                f"dispatch: experts={experts} does not divide by {world} ranks.\n"
                f"Say how many each rank holds, such as experts={list(held)}."
            )
            refuse("dispatch", group, problem)
    else:
        try:
            held = tuple(map(index, experts))
        except TypeError:  # not whole numbers
            held = ()
        if len(held) != world or any(n < 0 for n in held):
            problem = SizesError(
                f"dispatch: experts={experts!r} for a group of {world} ranks.\n"
                "Give their number, or one for each rank, in rank order."
            )
            refuse("dispatch", group, problem)
    return held


def combine(y: Tensor, sent: Dispatched, weights: Tensor | None = None) -> Tensor:
    """Bring what the experts made of the tokens back to where each token was, and add it up.

        expert 0: [ A D ]                   rank 0   [ A B ]
        expert 1: [ E ]          --->       rank 1   [ C ]
        expert 2: [ B C F ]                 rank 2   [ D E F ]

    ``y`` are the experts' outputs in the order of ``sent.tokens``, of any width. ``weights``, of
    the shape of ``routing``, multiply the choices of each token. Tokens that were dropped, or
    routed nowhere, get zeros.

    Gradient: the way there, exact to any order, also that of the weights.

    Cost: one collective each way.
    """
    if torch.compiler.is_compiling():
        from allgrad._autograd import graph_breaks

        back: Tensor = graph_breaks.run_routing(combine, y, sent, weights)
        return back
    require_tensors("combine", sent.group, y=y)
    if y.dim() != 2 or y.shape[0] != sum(sent.counts):
        problem = PieceMismatch(
            f"combine: y is {tuple(y.shape)}, but {sum(sent.counts)} tokens came to the experts of "
            "this rank.\nGive one row for each of them, in their order."
        )
        refuse("combine", sent.group, problem)
    if weights is not None:
        require_tensors("combine", sent.group, weights=weights)
    if weights is not None and weights.numel() != sent.shape.numel():
        problem = PieceMismatch(
            f"combine: weights are {tuple(weights.shape)}, routing was {tuple(sent.shape)}.\n"
            "Give one weight for each choice."
        )
        refuse("combine", sent.group, problem)
    if not y.shape[0]:  # so that this rank takes part in the backward of dispatch
        y = y + sent.tokens.sum()
    route, call = sent.route, resolve("combine", sent.group, lambda: describe_shapes([y], 0))
    if weights is None:
        return apply(route.pair(call).adjoint, [y])[0]
    (at_slots,) = apply(route.exchange_pair(call).adjoint, [y])
    weighted = at_slots * weights.reshape(-1, 1).index_select(0, route.slots)
    return apply(route.spread_pair().adjoint, [weighted])[0]


def _check_capacity(capacity: object, group: GroupLike) -> None:
    whole = isinstance(capacity, (int, np.integer)) and not isinstance(capacity, bool)
    if capacity is not None and (not whole or capacity < 0):  # type: ignore[operator]
        problem = (
            f"dispatch: capacity={capacity!r} is not a number of tokens.\nGive a whole number."
        )
        refuse("dispatch", group, InputError(problem))


def _with_room(counts: Counts, capacity: int, drop: bool) -> Counts:
    """What is left of the counts when an expert takes so many, in rank order."""
    before = counts.cumsum(0) - counts
    kept: Counts = np.minimum((capacity - before).clip(min=0), counts)
    full = np.flatnonzero(counts.sum(0) > capacity).tolist()
    if full and not drop:
        raise InputError(
            rank_table(
                f"dispatch: experts {full} have room for {capacity} tokens.",
                [f"sends them {row}" for row in counts[:, full].tolist()],
                {},
                "Give a larger capacity, or drop=True.",
            )
        )
    return kept


def _first_of_each(counts: Counts, kept: Counts) -> Tensor:
    """Positions of the first ``kept[e]`` of ``counts[e]`` entries that stand together."""
    starts = counts.cumsum() - counts
    within = np.arange(counts.sum()) - starts.repeat(counts)
    return torch.from_numpy(np.flatnonzero(within < kept.repeat(counts)))
