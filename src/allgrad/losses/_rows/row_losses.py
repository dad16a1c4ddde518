"""A term of the loss for each row of scores, from chunks of rows and columns that are not kept.

For a chunk of rows and a chunk of columns some numbers are added up for each row, over columns:

    pairs      logsumexp N of negatives   score of the one positive
    softmax    logsumexp N of negatives   P of positives   weighted sum of P - score of positives   weight
    sigmoid    -log sigmoid(-score) of negatives   the same of positives, weighted   weight

The numbers of all column chunks are combined, and give the row's loss. The scores of a chunk are
computed again in backward, unless all of them are few (recompute).

A softmax over positives and negatives has the logsumexp P + log(1 + exp(N - P)), and a row's loss is
the weighted mean of P - score plus log(1 + exp(N - P)). With one positive the first is exactly zero.
So a loss close to zero keeps its digits, and so do its gradients; a difference of two large sums would
be noise (test_tiny_loss_keeps_its_digits).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from allgrad.losses._rows.recompute import Pulled, pulled_by_graph, recomputed
from allgrad.losses._rows.score_tile import MASKED, ScoreTile, among
from allgrad.losses._rows.whole_rows import has_one_pass, losses_and_derivatives
from allgrad.losses._tiles.exponentials import logsumexp

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from allgrad.losses._kind import Activation

__all__ = [
    "Chunk",
    "PulledTile",
    "parts_of",
    "row_losses",
    "weighted_sums",
]

PulledTile: TypeAlias = "tuple[ScoreTile, Callable[[Tensor], Sequence[Tensor | None]]]"
T = TypeVar("T")
R = TypeVar("R")
C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class Chunk(Generic[T]):
    """Some rows or columns: their tensors, and what makes the rows or columns of these."""

    make: Callable[..., T]  # holds no tensor itself (recompute)
    tensors: tuple[Tensor | None, ...]

    def made(self) -> T:
        return self.make(*self.tensors)


def parts_of(x: Tensor, sizes: int | Sequence[int]) -> Sequence[Tensor]:
    """``x`` split along dim 0, and as it is if that is one part.

    Backward of a split joins its parts. Under autocast to the other dtype of 16 bits torch refuses that,
    which spares batches of one part (test_backward_under_autocast_to_the_other_16_bits).
    """
    is_one = len(sizes) == 1 if not isinstance(sizes, int) else len(x) <= sizes
    parts: Sequence[Tensor] = [x] if is_one else x.split(sizes)
    return parts


def _terms(kind: Activation, tile: ScoreTile) -> Tensor:
    """The numbers of each row, (numbers, rows)."""
    scores, chosen, others = tile.scores, tile.positives(), tile.negatives()
    weight = chosen if tile.weights is None else chosen * tile.weights
    if kind == "sigmoid":
        sums = [-(others * logsigmoid(-scores)).sum(1), -(weight * logsigmoid(scores)).sum(1)]
        return torch.stack([*sums, weight.sum(1)])
    negatives = logsumexp(among(scores, others), 1)
    if kind == "pairs":
        return torch.stack([negatives, (chosen * scores).sum(1)])
    positives, below = _spread(scores, chosen, weight, 1)
    return torch.stack([negatives, positives, below, weight.sum(1)])


def _spread(scores: Tensor, chosen: Tensor, weight: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The logsumexp of the chosen scores, and the weighted sum of their distances below it.

    Of a single score the distance is exactly zero, and so is its derivative.
    """
    below = among(scores, chosen).log_softmax(dim)
    count = chosen.sum(dim)
    # Not by logsumexp: where the derivatives by it and by the distances meet, digits would be lost.
    mean = (chosen * (scores - below)).sum(dim) / count.clamp(min=1)
    return torch.where(count > 0, mean, MASKED), -(weight * below).sum(dim)


def row_losses(
    kind: Activation,
    rows: Sequence[Chunk[R]],
    columns: Sequence[Chunk[C]],
    make_tile: Callable[..., ScoreTile],
    *shared: Tensor,
    pulled_tile: Callable[..., PulledTile | None] | None = None,
) -> Tensor:
    """Each row's loss, and 1 if it counts in a mean, else 0: (2, rows).

    With "softmax" rows without a positive do not count; in the others all do.

    ``make_tile(rows, columns, *shared)`` gives the scores of a row chunk and a column chunk;
    ``pulled_tile(needed, rows, columns, *shared)`` gives them with the gradients by the tensors of rows and
    columns and by ``shared``, or None where autograd must find these; without it, autograd does. There is at
    least one chunk of each, which may be empty, so that a rank without rows takes part in backward too.
    """
    tiles = _Tiles(kind, make_tile, pulled_tile, shared, _length(rows) * _length(columns))
    of_rows = tiles.losses if len(columns) == 1 else tiles.merged_losses
    return _join([of_rows(row, *columns) for row in rows])


def _length(chunks: Sequence[Chunk[T]]) -> int:
    return sum(len(chunk.tensors[0]) for chunk in chunks if chunk.tensors[0] is not None)


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Tiles of scores that are recomputed in backward, unless all ``scores`` of this rank are few."""

    kind: Activation
    make: Callable[..., ScoreTile]
    pulled: Callable[..., PulledTile | None] | None
    shared: Sequence[Tensor]
    scores: int

    def losses(self, row: Chunk[R], column: Chunk[C]) -> Tensor:
        """The losses and counts of rows whose scores are one tile."""
        kind, pulled = self.kind, self.pulled

        def losses(*tensors: Tensor | None) -> Tensor:
            return _LOSSES[kind](*_terms(kind, of_tensors(*tensors)).unbind())

        def in_one_pass(needed: Sequence[bool], *tensors: Tensor | None) -> Pulled | None:
            if pulled is None:
                found: PulledTile | None = pulled_by_graph(of_tensors, tensors, needed)
            else:
                found = with_chunks(partial(pulled, needed), *tensors)
            if found is None or not has_one_pass(found[0]):
                return None
            tile, pull = found
            both, by_scores = losses_and_derivatives(
                kind, tile._replace(scores=tile.scores.detach())
            )
            return Pulled(both, lambda by_both: pull(by_scores.mul_(by_both[0][:, None])))

        with_chunks, inputs = self._with_chunks(row, column)
        of_tensors = partial(with_chunks, self.make)
        return recomputed(losses, *inputs, scores=self.scores, once=in_one_pass)

    def merged_losses(self, row: Chunk[R], *columns: Chunk[C]) -> Tensor:
        """The same of rows in several tiles."""
        return _LOSSES[self.kind](
            *_merged(self.kind, *torch.stack([self._terms(row, x) for x in columns], 1))
        )

    def _terms(self, row: Chunk[R], column: Chunk[C]) -> Tensor:
        kind, make = self.kind, self.make
        with_chunks, inputs = self._with_chunks(row, column)
        return recomputed(
            lambda *tensors: _terms(kind, with_chunks(make, *tensors)), *inputs, scores=self.scores
        )

    def _with_chunks(
        self, row: Chunk[R], column: Chunk[C]
    ) -> tuple[Callable[..., Any], Sequence[Tensor | None]]:
        """What gives a function rows and columns in place of their tensors, and these."""
        first, make_row, make_column = len(row.tensors), row.make, column.make
        last = first + len(column.tensors)

        def with_chunks(function: Callable[..., T], *tensors: Tensor | None) -> T:
            rows, columns = make_row(*tensors[:first]), make_column(*tensors[first:last])
            return function(rows, columns, *tensors[last:])

        return with_chunks, (*row.tensors, *column.tensors, *self.shared)


def _merged(kind: Activation, first: Tensor, *others: Tensor) -> Sequence[Tensor]:
    """The numbers of several column chunks, (chunks, rows) each, become those of all columns."""
    if kind == "sigmoid":
        return [first.sum(0), *(x.sum(0) for x in others)]
    if kind == "pairs":
        return logsumexp(first, 0), others[0].sum(0)
    positives, below, weight = others
    chosen = (positives > MASKED / 2).to(weight.dtype)
    together, between = _spread(positives, chosen, weight, 0)
    return logsumexp(first, 0), together, below.sum(0) + between, weight.sum(0)


def _pairs(negatives: Tensor, score: Tensor) -> Tensor:
    return torch.stack([_log1p_exp(negatives - score), torch.ones_like(score)])


def _softmax(negatives: Tensor, positives: Tensor, below: Tensor, weight: Tensor) -> Tensor:
    has_positive = weight > 0
    loss = below / torch.where(has_positive, weight, 1) + _log1p_exp(negatives - positives)
    return torch.stack([torch.where(has_positive, loss, 0), has_positive.to(loss.dtype)])


def _sigmoid(negatives: Tensor, positives: Tensor, weight: Tensor) -> Tensor:
    has_positive = weight > 0
    mean = positives / torch.where(has_positive, weight, 1)
    loss = negatives + torch.where(has_positive, mean, 0)
    return torch.stack([loss, torch.ones_like(loss)])


_LOSSES: dict[Activation, Callable[..., Tensor]] = {
    "pairs": _pairs,
    "softmax": _softmax,
    "sigmoid": _sigmoid,
}


def _log1p_exp(x: Tensor) -> Tensor:
    # The derivatives of softplus keep their digits too. Above 40 it is x in float64 as well.
    return softplus(x, threshold=40)


def _join(chunks: Sequence[Tensor]) -> Tensor:
    # Torch cuts the graph of the gradient behind a cat of an empty vector. A rank without rows has
    # one chunk, and takes part in the second derivative too (the kind "empty" of the tests).
    return chunks[0] if len(chunks) == 1 else torch.cat(list(chunks), 1)


def weighted_sums(losses: Tensor, weights: Tensor | None) -> Tensor:
    """The weighted sum of the losses of rows that count, and the sum of the weights."""
    if weights is not None:
        losses = losses * weights.to(losses.dtype)  # which is that of the features
    return losses.sum(1)
