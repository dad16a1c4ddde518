"""The demo: a ragged all_gather with its gradient on real ranks, and the same in one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from allgrad.collectives.all_gather import all_gather
from allgrad.testing import run_ranks
from allgrad.world import rank_of

if TYPE_CHECKING:
    from torch import Tensor

_SIZES = (2, 1, 3, 2)


class _Outcome(NamedTuple):
    held: Tensor
    got: Tensor
    gradient: Tensor


def _held(rank: int) -> Tensor:
    length = _SIZES[rank % len(_SIZES)]
    return torch.arange(1, length + 1, dtype=torch.float64) + 10 * rank


def _loss(joined: Tensor, rank: int) -> Tensor:
    """Each rank uses the joined pieces in its own way."""
    return (rank + 1) * joined.square().sum() / 2


def _on_rank() -> _Outcome:
    rank = rank_of()
    piece = _held(rank).requires_grad_()
    joined = all_gather(piece)
    _loss(joined, rank).backward()
    assert piece.grad is not None
    return _Outcome(piece.detach(), joined.detach(), piece.grad)


def _in_one_process(ranks: int) -> list[_Outcome]:
    pieces = [_held(rank).requires_grad_() for rank in range(ranks)]
    joined = torch.cat(pieces)
    total = torch.stack([_loss(joined, rank) for rank in range(ranks)]).sum()
    gradients = torch.autograd.grad(total, pieces)
    return [
        _Outcome(piece.detach(), joined.detach(), gradient)
        for piece, gradient in zip(pieces, gradients, strict=True)
    ]


def show(ranks: int) -> bool:
    """Run, print, and tell whether the two agree to the last bit."""
    console = Console()
    console.print(f"Starting {ranks} processes ...")
    got = run_ranks(_on_rank, ranks)
    wanted = _in_one_process(ranks)
    table = Table(title=f"all_gather of unequal pieces, forward and backward, {ranks} ranks")
    for heading in ("rank", "held", "got", "gradient", "gradient in one process"):
        table.add_column(heading)
    for rank, (mine, want) in enumerate(zip(got, wanted, strict=True)):
        row = (mine.held, mine.got, mine.gradient, want.gradient)
        table.add_row(str(rank), *(_numbers(t) for t in row))
    console.print(table)
    largest = max(
        float((a - b).abs().max())
        for mine, want in zip(got, wanted, strict=True)
        for a, b in zip(mine, want, strict=True)
    )
    console.print(f"Largest difference between {ranks} processes and one: {largest:g}")
    return largest == 0.0


def _numbers(t: Tensor) -> str:
    return " ".join(f"{value:g}" for value in t.tolist())
