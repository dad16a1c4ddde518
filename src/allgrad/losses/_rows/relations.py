"""Which keys are positives and negatives of which queries, and the scores of both in chunks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from allgrad.losses._rows.row_losses import Chunk, parts_of, row_losses
from allgrad.losses._rows.score_tile import ScoreTile
from allgrad.losses._tiles.accumulators import accumulator_dtype
from allgrad.losses._tiles.narrow_products import similarities, weighted_features

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from allgrad.losses._kind import Activation
    from allgrad.losses._rows.row_losses import PulledTile

__all__ = ["Keys", "Queries", "Relation", "score_rows", "taken_apart"]

# Where the tensors of columns, and the numbers, are among those of a tile: behind features, ids, own and limit
# of rows; behind features, ids, weights and filled of columns.
_COLUMN, _FIRST_NUMBER = 4, 8

TILE = (1024, 8192)  # rows and columns of the scores that exist at a time


@dataclass(frozen=True, slots=True)
class Queries:
    """The rows: this rank's queries."""

    features: Tensor
    ids: Tensor | None
    own: Tensor | None  # the column of each query's own key
    limit: Tensor | None = None  # a negative above it is a false one

    def chunks(self) -> list[Chunk[Queries]]:
        features = parts_of(self.features, TILE[0])
        parts = [_split(x, TILE[0], len(features)) for x in (self.ids, self.own, self.limit)]
        return [Chunk(Queries, tensors) for tensors in zip(features, *parts, strict=True)]


@dataclass(frozen=True, slots=True)
class Keys:
    """Columns: the keys of all ranks in rank order, or of a queue."""

    features: Tensor
    ids: Tensor | None
    weights: Tensor | None = None
    filled: Tensor | None = None  # which keys of a queue count
    first: int = 0  # the column of the first of them

    def chunks(self) -> list[Chunk[Keys]]:
        features = parts_of(self.features, TILE[1])
        parts = [_split(x, TILE[1], len(features)) for x in (self.ids, self.weights, self.filled)]
        made, first = [], self.first
        for tensors in zip(features, *parts, strict=True):
            made.append(Chunk(partial(Keys, first=first), tensors))
            first += len(tensors[0])
        return made


def taken_apart(
    columns: Sequence[Keys],
) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], list[Keys]]]:
    """The tensors of some columns, and what puts them together again, which holds none of them."""
    fields = "features", "ids", "weights", "filled"
    held = [{name: getattr(keys, name) for name in fields} for keys in columns]
    given = [[name for name in fields if one[name] is not None] for one in held]
    firsts = [keys.first for keys in columns]

    def put_together(tensors: Sequence[Tensor]) -> list[Keys]:
        rest, none = iter(tensors), dict.fromkeys(fields)
        return [
            Keys(**cast("Any", none | {name: next(rest) for name in names}), first=first)
            for names, first in zip(given, firsts, strict=True)
        ]

    tensors = [one[name] for one, names in zip(held, given, strict=True) for name in names]
    return tensors, put_together


@dataclass(frozen=True, slots=True)
class Relation:
    """How positives and negatives are told apart.

    With ``by_ids`` all keys with a query's id are its positives. Otherwise its own key is, and
    other keys with its id are neither positives nor negatives.
    """

    by_ids: bool
    exclude_self: bool = False
    margin: float | None = None

    def masks(self, rows: Queries, columns: Keys, similarity: Tensor) -> tuple[Tensor, Tensor]:
        own = same = None
        if rows.own is not None:
            last = columns.first + columns.features.shape[0]
            own = rows.own[:, None] == torch.arange(columns.first, last, device=rows.own.device)
        if rows.ids is not None and columns.ids is not None:
            same = rows.ids[:, None] == columns.ids
        positive = same if self.by_ids else own
        assert positive is not None
        left = positive if own is None or same is None else same | own
        if self.exclude_self:
            assert own is not None
            positive = positive & ~own
        negative = ~left
        if columns.filled is not None:
            positive, negative = positive & columns.filled, negative & columns.filled
        if rows.limit is not None:
            negative = negative & (similarity.detach() <= rows.limit[:, None])
        return positive, negative

    @torch.no_grad()
    def limited(self, rows: Queries, columns: Sequence[Keys]) -> Queries:
        """The queries with what a margin leaves them: the highest positive minus the margin."""
        if self.margin is None:
            return rows
        highest = []
        for row in (chunk.made() for chunk in rows.chunks()):
            x = row.features
            best = x.new_full((len(x),), -torch.inf)
            for keys in columns:
                for column in (chunk.made() for chunk in keys.chunks()):
                    similarity = _similarity(x, column.features)
                    positive, _ = self.masks(row, column, similarity)
                    masked = similarity.masked_fill(~positive, -torch.inf)
                    if masked.shape[1]:
                        best = torch.maximum(best, masked.amax(1))
            highest.append(best)
        best = torch.cat(highest)
        limit = (best - self.margin).masked_fill(best == -torch.inf, torch.inf)
        return Queries(rows.features, rows.ids, rows.own, limit)


def score_rows(  # noqa: PLR0917
    kind: Activation,
    relation: Relation,
    rows: Queries,
    columns: Sequence[Keys],
    scale: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """Each query's loss among all keys, and whether it counts (row_losses)."""
    dtype = rows.features.dtype
    wide = accumulator_dtype(dtype)
    shared = [x.to(rows.features.device, wide).reshape(()) for x in (scale, bias) if x is not None]
    tiles = _Tiles(relation, dtype)
    # Before they are cut: the gradients of chunks are added up. Those of a queue have none.
    rows = replace(rows, features=rows.features.to(wide))
    columns = [
        keys if keys.filled is not None else replace(keys, features=keys.features.to(wide))
        for keys in columns
    ]
    limited = relation.limited(rows, columns)
    chunks = [chunk for keys in columns for chunk in keys.chunks()]
    return row_losses(kind, limited.chunks(), chunks, tiles.tile, *shared, pulled_tile=tiles.pulled)


@dataclass(frozen=True, slots=True)
class _Tiles:
    """The scores of rows and columns, whose features had this dtype before they were made wide."""

    relation: Relation
    dtype: torch.dtype

    def tile(
        self, row: Queries, column: Keys, scale: Tensor, bias: Tensor | None = None
    ) -> ScoreTile:
        x, y = row.features, column.features
        if row.limit is None:  # one pass over the scores less
            scores = similarity = _similarity(scale * x, y)
        else:
            similarity = _similarity(x, y)
            scores = scale * similarity
        if bias is not None:
            scores = scores + bias
        return self._related(row, column, scores, similarity)

    def pulled(
        self,
        needed: Sequence[bool],
        row: Queries,
        column: Keys,
        scale: Tensor,
        bias: Tensor | None = None,
    ) -> PulledTile | None:
        """The same with its gradients, in few steps; None if the weights of keys need one."""
        at_bias = _FIRST_NUMBER + 1
        needs_x, needs_y, needs_weights = needed[0], needed[_COLUMN], needed[_COLUMN + 2]
        needs_scale, needs_bias = needed[_FIRST_NUMBER], bias is not None and needed[at_bias]
        if needs_weights:
            return None
        x, y = row.features, column.features
        # A margin compares similarities, of which equal ones must be equal.
        dtype = self.dtype if row.limit is None else x.dtype
        similarity = similarities(x, y, dtype)
        # Selective checkpointing may save a product, which must not change in place then (whole_pass).
        scores = similarity * scale
        if bias is not None:
            scores.add_(bias)

        def pull(by_scores: Tensor) -> list[Tensor | None]:
            found: list[Tensor | None] = [None] * len(needed)
            given = x if needs_y else None, y if needs_x or needs_scale else None
            by_x, by_y = weighted_features(by_scores, *given, dtype)
            if by_x is not None and needs_scale:
                found[_FIRST_NUMBER] = torch.dot(by_x.view(-1), x.reshape(-1))
            if by_x is not None and needs_x:
                found[0] = by_x.mul_(scale)
            if by_y is not None:
                found[_COLUMN] = by_y.mul_(scale)
            if needs_bias:
                found[at_bias] = by_scores.sum()
            return found

        return self._related(row, column, scores, similarity), pull

    def _related(self, row: Queries, column: Keys, scores: Tensor, similarity: Tensor) -> ScoreTile:
        weights = None if column.weights is None else column.weights.to(scores.dtype)
        return ScoreTile(scores, *self.relation.masks(row, column, similarity), weights)


def _split(x: Tensor | None, size: int, count: int) -> Sequence[Tensor | None]:
    return [None] * count if x is None else parts_of(x, size)


def _similarity(x: Tensor, y: Tensor) -> Tensor:
    """Products in float32 at least: rounded to 16 bits, they would cost digits of the gradients."""
    return x @ y.to(x.dtype).T
