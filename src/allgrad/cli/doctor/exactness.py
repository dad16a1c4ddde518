"""One call of every collective on small whole numbers, with its gradient: exact or wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from allgrad._wire.world import sum_over_ranks
from allgrad.collectives.all_gather import all_gather, gather_sizes, reduce_scatter, split
from allgrad.collectives.all_reduce import all_reduce, share
from allgrad.collectives.all_to_all import all_to_all
from allgrad.collectives.broadcast import broadcast, reduce
from allgrad.collectives.gather import gather, scatter
from allgrad.collectives.permute import permute, shift
from allgrad.collectives.scan import scan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

__all__ = ["wrong_collectives"]


class Case(NamedTuple):
    """A linear call, what this rank brings, and what it must get."""

    name: str
    call: Callable[[Any], Tensor]
    x: Tensor | None
    expected: Tensor
    counts_once: bool = False  # every rank brings the same value, which is one value


def _cases(rank: int, size: int) -> Iterator[Case]:
    """Rank r brings r + 1; the length of its piece is 1, 2 or, on every third rank, 0."""

    def numbers(values: Any) -> Tensor:
        return torch.tensor(list(values), dtype=torch.float64)

    ranks = range(size)
    lengths = [(r + 1) % 3 for r in ranks]
    own, total = rank + 1, size * (size + 1) // 2
    piece = numbers([own] * lengths[rank])
    joined = numbers(r + 1 for r in ranks for _ in range(lengths[r]))
    pair = numbers([own, 2 * own])
    blocks = numbers(own * (r + 1) for r in ranks)
    plain = numbers(r + 1 for r in ranks)
    before, last = (rank - 1) % size, size - 1
    yield Case("all_reduce", all_reduce, pair, numbers([total, 2 * total]))
    yield Case("all_gather", all_gather, piece, joined)
    yield Case("reduce_scatter", reduce_scatter, blocks, numbers([own * total]))
    yield Case("all_to_all", all_to_all, blocks, own * plain)
    yield Case("broadcast", lambda x: broadcast(x, last), pair, numbers([size, 2 * size]))
    yield Case(
        "reduce",
        lambda x: reduce(x, last),
        pair,
        numbers([total, 2 * total] if rank == last else [0, 0]),
    )
    yield Case("gather", gather, piece, joined if rank == 0 else joined[:0])
    yield Case("scatter", scatter, plain if rank == 0 else None, numbers([own]))
    pairs = [(r, (r + 1) % size) for r in ranks]
    yield Case("permute", lambda x: permute(x, pairs), pair, numbers([before + 1, 2 * before + 2]))
    yield Case("shift", shift, piece, numbers([before + 1] * lengths[before]))
    yield Case("scan", scan, numbers([own]), numbers([own * (own + 1) // 2]))
    yield Case("share", share, plain, plain, counts_once=True)
    yield Case("split", split, plain, numbers([own]), counts_once=True)


def wrong_collectives(rank: int, size: int, device: torch.device) -> tuple[int, list[str]]:
    """How many collectives were called, and which of them were wrong on this rank.

    A gradient is checked by the adjoint identity, ``<A x, y> = <x, A* y>`` summed over ranks. All
    numbers are whole and small, so the two sides are equal to the last bit.
    """
    wrong, sides, names = [], [], []
    for case in _cases(rank, size):
        x = None if case.x is None else case.x.to(device, copy=True).requires_grad_()
        got = case.call(x)
        if not torch.equal(got.detach().cpu(), case.expected):
            wrong.append(case.name)
        weights = torch.full_like(got, rank + 1)
        got.backward(weights)
        forward = (got.detach() * weights).sum()
        gradient = None if x is None else x.grad
        backward = forward * 0 if x is None or gradient is None else (x.detach() * gradient).sum()
        sides.append(torch.stack([forward, backward * (not case.counts_once or rank == 0)]))
        names.append(case.name)
    for name, (forward, backward) in zip(
        names, sum_over_ranks(torch.stack(sides)).tolist(), strict=True
    ):
        if forward != backward:
            wrong.append(f"gradient of {name}")
    lengths = tuple((r + 1) % 3 for r in range(size))
    if tuple(gather_sizes(torch.zeros(lengths[rank], device=device))) != lengths:
        wrong.append("gather_sizes")
    return len(names) + 1, wrong
