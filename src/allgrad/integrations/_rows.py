"""The rows of a rank among the rows of all ranks: where they start, and what their mean counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from allgrad._wire.primitives import resolve
from allgrad.collectives.all_gather import all_gather, gather_sizes
from allgrad.containers import tensors
from allgrad.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from allgrad.types import GroupLike

__all__ = ["RowGather", "batch_weight", "pad_to_longest"]


def batch_weight(x: Tensor, dim: int = 0, *, group: GroupLike = None) -> float:
    """What a mean over the rows of ``x`` counts where a wrapper averages: W * own rows / all rows.

        rank 0   mean over 3 rows   * 2 * 3/4
        rank 1   mean over 1 row    * 2 * 1/4     averaged by DDP: the mean over all 4 rows

    For the loss of a rank that is a mean over its own rows, with a model in DDP or FSDP.

    Cost: one size exchange.
    """
    return _weight(gather_sizes(x, dim, group=group), resolve("batch_weight", group).rank)


def _weight(sizes: tuple[int, ...], rank: int) -> float:
    if sum(sizes) == 0:
        raise InputError("batch_weight: no rank has a row.\nGive at least one rank a batch.")
    return len(sizes) * sizes[rank] / sum(sizes)


def pad_to_longest(x: Tensor, dim: int = 1, *, first: bool = False) -> Tensor:
    """Pad with zeros along ``dim`` to the length of the longest rank."""
    longest = max(gather_sizes(x.new_empty(x.shape[dim])))
    missing = longest - x.shape[dim]
    before, after = (missing, 0) if first else (0, missing)
    return pad(x, (*(0, 0) * (x.ndim - 1 - dim), before, after)) if missing else x


class FirstRow(int):
    """The first own row among all rows, for code that computes it as ``rank * batch_size``."""

    def __mul__(self, batch_size: int) -> int:
        """The first row, whatever the batch sizes of the ranks before are."""
        return int(self)


class RowGather:
    """Gathers rows of all ranks along dim 0, and knows where the own ones are.

    rank 0   [ a a ]              [ a a | b | c c c ]     first_row 0
    rank 1   [ b ]       --->     [ a a | b | c c c ]     first_row 2
    rank 2   [ c c c ]            [ a a | b | c c c ]     first_row 3

    Everything is along dim 0 of the default group.
    """

    def __init__(self) -> None:
        """Nothing is gathered yet."""
        self._sizes: tuple[int, ...] | None = None
        self._joined: list[tuple[Tensor, Tensor]] | None = None  # each with a leaf for its gradient
        self._weighted = False

    def __call__(self, x: Tensor) -> Tensor:
        """All rows, with their exact gradient."""
        self._sizes = gather_sizes(x)
        joined = all_gather(x, sizes=self._sizes)
        if self._joined is None or not joined.requires_grad:
            return joined
        leaf = joined.detach().requires_grad_()
        self._joined.append((joined, leaf))
        return leaf

    def first_row(self) -> FirstRow:
        """In place of the rank."""
        return FirstRow(sum(self.sizes[: resolve("all_gather", None).rank]))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The rows by rank."""
        if self._sizes is None:
            raise InputError(
                "integrations: the loss has gathered nothing.\n"
                "Create it with gather_across_devices=True."
            )
        return self._sizes

    @property
    def weight(self) -> float:
        """What a mean over the own rows counts; 1 if a loss with cached gradients has it already."""
        return 1.0 if self._weighted else _weight(self.sizes, resolve("all_gather", None).rank)

    def cached(self, calculate_loss: Callable[..., Any]) -> Callable[..., Any]:
        """``calculate_loss(reps, ..., with_backward)`` of a loss that caches the gradients of ``reps``.

        Such a loss runs backward by itself, for one chunk of rows after another, and ranks with
        unequal batches have different numbers of chunks. Here gradients are sent back once, at the
        end, and each rank's part has its weight before it is summed with those of other ranks.
        """

        def calculate(reps: Any, *args: Any, with_backward: bool = False, **kwargs: Any) -> Any:
            if not with_backward:
                loss, weight = calculate_loss(reps, *args, **kwargs), self.weight
            else:
                joined: list[tuple[Tensor, Tensor]] = []
                self._joined = joined
                try:
                    loss = calculate_loss(reps, *args, with_backward=True, **kwargs)
                finally:
                    self._joined = None
                weight = self.weight
                for rep in tensors(reps):
                    if rep.grad is not None:
                        rep.grad.mul_(weight)
                for everyone, leaf in joined:
                    grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad * weight
                    torch.autograd.backward(everyone, grad)
            self._weighted = True
            return loss * weight

        return calculate
