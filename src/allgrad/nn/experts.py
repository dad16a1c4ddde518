"""Mixtures of experts: tokens to the ranks of their experts, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import torch

from allgrad._autograd.adjoint_pair import AdjointPair
from allgrad._autograd.transforms import apply, is_plain_autograd
from allgrad.collectives.all_to_all import all_to_all
from allgrad.errors import InputError, PieceMismatch, SizesError, TensorError, rank_table
from allgrad.nn._ranks import Place, feature_sizes, find_place, refuse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from allgrad.types import GroupLike

__all__ = ["Dispatched", "combine", "dispatch"]

Counts: TypeAlias = (
    "np.ndarray[tuple[int, int], np.dtype[np.int64]]"  # on the host, by rank and expert
)


@dataclass(frozen=True, slots=True)
class Dispatched:
    """Tokens at their experts, and what ``combine`` needs for the way back."""

    tokens: Tensor  # by expert, then by the rank they come from, then in that rank's order
    counts: tuple[int, ...]  # tokens of each own expert
    experts: range  # the own experts
    dropped: int  # choices of this rank that found no room
    slots: Tensor  # which of this rank's choices were sent, in the order sent
    spread: AdjointPair  # tokens to slots <-> slots to tokens
    regroup: AdjointPair | None  # the order received <-> the order of experts
    shape: torch.Size  # of routing
    send_sizes: tuple[int, ...]
    recv_sizes: tuple[int, ...]
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

    Cost: one collective each way, and one small message of as many numbers as there are experts.
    It reads the counts on the host. ``combine`` needs no further message for sizes.
    """
    place = find_place("dispatch", group)
    if isinstance(experts, int):
        held = feature_sizes("dispatch", "experts", experts, place.world, ragged=False)
    else:
        held = tuple(experts)
        if len(held) != place.world or any(n < 0 for n in held):
            raise SizesError(
                f"dispatch: experts={list(held)} for a group of {place.world} ranks.\n"
                "Give one number for each rank, in rank order."
            )
    number = sum(held)
    chosen = _choices(x, routing)
    expert = torch.where((chosen >= 0) & (chosen < number), chosen, number)
    options = _Options(held, capacity, drop)
    counts = _counts_by_rank(
        x, routing, torch.bincount(expert, minlength=number + 1), options, (place, group)
    )
    kept = counts if capacity is None else _with_room(counts, capacity, drop)

    slots = _in_order(expert, number)[: int(counts[place.rank].sum())]
    dropped = int((counts - kept)[place.rank].sum())
    if dropped:
        slots = slots[_first_of_each(counts[place.rank], kept[place.rank]).to(slots.device)]
    ends = np.cumsum([0, *held])
    first = int(ends[place.rank])
    own = kept[:, first : first + held[place.rank]]
    upto = np.concatenate([[0], kept[place.rank].cumsum()])[ends]
    send, receive = tuple(np.diff(upto).tolist()), tuple(own.sum(1).tolist())
    spread = _spread(slots, len(x), routing[:1].numel() or 1)
    (tokens,) = apply(spread, [x])
    tokens = all_to_all(tokens, send_sizes=send, recv_sizes=receive, group=group)
    regroup = _regroup(own, x.device) if min(own.shape) > 1 else None
    if regroup is not None:
        (tokens,) = apply(regroup, [tokens])
    return Dispatched(
        tokens=tokens,
        counts=tuple(own.sum(0).tolist()),
        experts=range(first, first + held[place.rank]),
        dropped=dropped,
        slots=slots,
        spread=spread,
        regroup=regroup,
        shape=routing.shape,
        send_sizes=send,
        recv_sizes=receive,
        group=group,
    )


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
    if y.dim() != 2 or len(y) != sum(sent.counts):
        problem = PieceMismatch(
            f"combine: y is {tuple(y.shape)}, but {sum(sent.counts)} tokens came to the experts of "
            "this rank.\nGive one row for each of them, in their order."
        )
        refuse("combine", sent.group, problem)
    if weights is not None and weights.numel() != sent.shape.numel():
        problem = PieceMismatch(
            f"combine: weights are {tuple(weights.shape)}, routing was {tuple(sent.shape)}.\n"
            "Give one weight for each choice."
        )
        refuse("combine", sent.group, problem)
    if not len(y):  # so that this rank takes part in the backward of dispatch
        y = y + sent.tokens.sum()
    if sent.regroup is not None:
        (y,) = apply(sent.regroup.adjoint, [y])
    back = all_to_all(y, send_sizes=sent.recv_sizes, recv_sizes=sent.send_sizes, group=sent.group)
    if weights is not None:
        back = back * weights.reshape(-1, 1).index_select(0, sent.slots)
    return apply(sent.spread.adjoint, [back])[0]


def _spread(slots: Tensor, tokens: int, choices: int) -> AdjointPair:
    """Each token to its slots <-> the sum of its slots to each token.

    Both look rows up; adding rows by index would take them one after another.
    """
    rows = slots // choices if choices > 1 else slots
    dropped = len(slots) < tokens * choices  # or routed nowhere
    at = slots.new_zeros(tokens * choices)
    at.index_copy_(0, slots, torch.arange(len(slots), device=slots.device))
    unsent = torch.ones_like(at, dtype=torch.bool).index_fill(0, slots, False) if dropped else None

    def to_slots(xs: Sequence[Tensor]) -> list[Tensor]:
        return [x.index_select(0, rows) for x in xs]

    def to_tokens(ys: Sequence[Tensor]) -> list[Tensor]:
        return [sum_of_slots(y) for y in ys]

    def sum_of_slots(y: Tensor) -> Tensor:
        if not len(y):
            return y.new_zeros(tokens, *y.shape[1:])
        found = y.index_select(0, at)
        if unsent is not None:
            found = found.masked_fill_(unsent.view(-1, *[1] * (y.dim() - 1)), 0)
        return found.view(tokens, choices, *y.shape[1:]).sum(1) if choices > 1 else found

    return AdjointPair("dispatch", "combine", to_slots, to_tokens)


def _regroup(counts: Counts, device: torch.device) -> AdjointPair:
    """Blocks by (rank, expert) of these lengths <-> blocks by (expert, rank)."""
    there, back = _transposed_blocks(counts).to(device), _transposed_blocks(counts.T).to(device)
    return AdjointPair(
        "dispatch",
        "combine",
        lambda xs: [x.index_select(0, there) for x in xs],
        lambda xs: [x.index_select(0, back) for x in xs],
    )


class _Options(NamedTuple):
    """The arguments that must be the same on every rank."""

    held: tuple[int, ...]
    capacity: int | None
    drop: bool

    def row(self) -> list[int]:
        return [hash(self.held), -1 if self.capacity is None else self.capacity, self.drop]


def _choices(x: Tensor, routing: Tensor) -> Tensor:
    """All choices of this rank, one after another; none where the arguments do not fit."""
    good = x.dim() == 2 and routing.dim() in {1, 2} and len(routing) == len(x)
    whole = not routing.is_floating_point() and not routing.is_complex()
    return routing.reshape(-1) if good and whole else routing.new_zeros(0, dtype=torch.int64)


def _in_order(expert: Tensor, number: int) -> Tensor:
    """The choices by expert, in their order within each; those of none at the end."""
    if expert.is_cpu and number < np.iinfo(np.int16).max and is_plain_autograd():
        # numpy sorts short integers by counting: a tenth of the time.
        return torch.from_numpy(np.argsort(expert.numpy().astype(np.int16), kind="stable"))
    return expert.argsort(stable=True)


def _counts_by_rank(
    x: Tensor, routing: Tensor, counts: Tensor, options: _Options, where: tuple[Place, GroupLike]
) -> Counts:
    """How many choices of each rank fall on each expert. A mistake of one rank raises on all."""
    number, (place, group) = len(counts) - 1, where
    chosen = _choices(x, routing)
    span = counts.new_full((2,), -1)
    if len(chosen):
        span = torch.stack(torch.aminmax(chosen)).long()
    shapes = [x.dim(), *_two(x), routing.dim(), *_two(routing), int(routing.is_floating_point())]
    row = torch.cat([span, span.new_tensor([*shapes, *options.row()]), counts[:number]])
    # One step: an all_gather of short rows takes two, by way of a root.
    each = (1,) * place.world
    copies = row.to(x.device).expand(place.world, -1)
    rows = all_to_all(copies, send_sizes=each, recv_sizes=each, group=group, grad="none").cpu()
    _require_fitting(rows[:, :12].tolist(), number)
    found: Counts = rows[:, 12:].numpy()
    return found


def _require_fitting(facts: list[list[int]], number: int) -> None:
    """Check what the ranks told of their arguments; every rank sees the same."""
    shown = [f"x {tuple(f[3:5][: f[2]])}, routing {tuple(f[6:8][: f[5]])}" for f in facts]
    marks = {
        rank: "do not fit"
        for rank, f in enumerate(facts)
        if f[2] != 2 or f[5] not in {1, 2} or f[3] != f[6] or f[8]
    }
    if marks:
        raise TensorError(
            rank_table(
                "dispatch: x is (tokens, features), and routing has whole numbers for each token.",
                shown,
                marks,
                "Give routing of shape (tokens) or (tokens, choices).",
            )
        )
    marks = {rank: "unknown" for rank, f in enumerate(facts) if f[0] < -1 or f[1] >= number}
    if marks:
        raise InputError(
            rank_table(
                f"dispatch: there are experts 0 to {number - 1}, and -1 for none.",
                [f"routing from {f[0]} to {f[1]}" for f in facts],
                marks,
                "Route to experts that some rank holds.",
            )
        )
    kinds = [(f[4], *f[9:]) for f in facts]
    usual = max(kinds, key=kinds.count)
    odd = {rank: "differs" for rank, kind in enumerate(kinds) if kind != usual}
    if odd:
        raise PieceMismatch(
            rank_table(
                "dispatch: tokens of all ranks have one width, and the ranks the same options.",
                [f"{f[4]} features, capacity={f[10]}, drop={bool(f[11])}" for f in facts],
                odd,
                "Give every rank the same features, experts=, capacity= and drop=.",
            )
        )


def _two(x: Tensor) -> tuple[int, int]:
    shape = (*x.shape, 0, 0)
    return shape[0], shape[1]


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


def _transposed_blocks(counts: Counts) -> Tensor:
    """Where the rows of blocks that stand by row of ``counts`` are to be found, by column."""
    lengths = counts.ravel()
    starts = (lengths.cumsum() - lengths).reshape(counts.shape).T.ravel()
    lengths = counts.T.ravel()
    ends = lengths.cumsum()
    return torch.from_numpy(np.arange(ends[-1]) + (starts - (ends - lengths)).repeat(lengths))
