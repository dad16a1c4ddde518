"""InfoNCE with in-batch, hard and queued negatives, in one direction or in both."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from allgrad.collectives.all_gather import all_gather
from allgrad.errors import InputError, PieceMismatch
from allgrad.losses._agreement import CallSpec, agree, require
from allgrad.losses._each_row import global_mean
from allgrad.losses._feature_checks import (
    check_features,
    check_number,
    check_per_row,
    check_reduction,
    number,
)
from allgrad.losses._in_graphs import in_graphs
from allgrad.losses._relations import Keys, Queries, Relation, score_rows

if TYPE_CHECKING:
    from allgrad.losses._arguments import GradReduction
    from allgrad.losses.key_queue import KeyQueue
    from allgrad.types import GroupLike

__all__ = ["multiple_negatives_loss"]


@in_graphs
def multiple_negatives_loss(
    query: Tensor,
    key: Tensor,
    scale: Tensor | float,
    *,
    hard_negatives: Tensor | None = None,
    queue: KeyQueue | None = None,
    symmetric: bool = False,
    ids: Tensor | None = None,
    hard_negative_ids: Tensor | None = None,
    weights: Tensor | None = None,
    margin: float | None = None,
    grad_reduction: GradReduction = "mean",
    group: GroupLike = None,
) -> Tensor:
    """Cross entropy of each query among all keys, hard negatives and queued keys.

        rank 0   query [ a a ]     key [ a a ]     hard [ x ]
        rank 1   query [ b ]       key [ b ]       hard [ ]      --->   loss of [ a a | b | c c c ]
        rank 2   query [ c c c ]   key [ c c c ]   hard [ y y ]         with [ x | y y ] and the queue

    Query i and key i are a pair. The other keys, the hard negatives (rows, width) of all ranks and
    the ``queue`` are negatives. ``symmetric`` takes the mean with the cross entropy of each key among
    the queries of all ranks.

    Not every other key is a negative: with ``ids``, one for each pair, keys with the query's id are
    left out (the same caption twice); hard negatives and the queue then need ids too. With
    ``margin``, negatives are left out whose similarity, before the scale, is above that of the pair
    minus the margin. ``weights``, one for each pair, weigh the pairs in the mean.

    Gradient and cost: see ``supcon_loss``; ``symmetric`` doubles both.
    """
    features = {"query": query, "key": key, "hard_negatives": hard_negatives}
    own_ids = {"ids": ids, "hard_negative_ids": hard_negative_ids}

    def check() -> CallSpec:
        check_features(features)
        check_number("scale", scale)
        check_reduction(grad_reduction)
        require(
            len(query) == len(key),
            PieceMismatch,
            f"query and key have {len(query)} and {len(key)} rows.",
            "Give one key for each query on a rank; ranks may differ.",
        )
        check_per_row("ids", ids, "query", len(query), whole=True)
        check_per_row("weights", weights, "query", len(query), whole=False)
        hard = 0 if hard_negatives is None else len(hard_negatives)
        check_per_row("hard_negative_ids", hard_negative_ids, "hard_negatives", hard, whole=True)
        _check_both_sides(ids, hard_negatives, hard_negative_ids, queue)
        if queue is not None:
            queue.check_width(query)
        given = [x is None for x in (queue, ids, weights)]
        same = {
            "width": query.shape[1],
            "dtype": query.dtype,
            "options": (symmetric, margin, grad_reduction, given),
        }
        return CallSpec(same, (len(query), hard))

    agreed = agree("multiple_negatives_loss", {**features, **own_ids, "scale": scale}, check, group)
    pairs = agreed.column(0)
    if not sum(pairs):
        raise InputError(
            "multiple_negatives_loss: no rank has a pair.\nGive at least one rank a pair."
        )
    relation, factor = Relation(by_ids=False, margin=margin), number(scale)

    def direction(rows: Tensor, *candidates: Tensor | None, sizes: tuple[int, ...]) -> list[Tensor]:
        """The loss of each row, whose own column is its rank's first candidate and so on."""
        gathered = {"key": torch.cat([x for x in candidates if x is not None])}
        if ids is not None:
            more = hard_negative_ids if len(candidates) > 1 else None
            gathered["ids"] = torch.cat([x for x in (ids, more) if x is not None]).long()
        joined = all_gather(gathered, sizes=sizes, group=group)
        first = sum(sizes[: agreed.rank])
        own = torch.arange(first, first + len(rows), device=rows.device)
        columns = [Keys(joined["key"], joined.get("ids"), 0)]
        if queue is not None and len(candidates) > 1:
            old = queue.features.to(rows)
            columns.append(Keys(old, queue.ids, sum(sizes), filled=queue.filled))
        queries = Queries(rows, None if ids is None else ids.long(), own)
        return list(score_rows("softmax", relation, queries, columns, factor))

    keys = tuple(a + b for a, b in agreed.counts)
    losses, counted = direction(query, key, hard_negatives, sizes=keys)
    if symmetric:
        losses = (losses + direction(key, query, sizes=pairs)[0]) / 2
    return global_mean(losses, counted, weights, grad_reduction, group)


def _check_both_sides(
    ids: Tensor | None,
    hard_negatives: Tensor | None,
    hard_negative_ids: Tensor | None,
    queue: KeyQueue | None,
) -> None:
    require(
        hard_negatives is None or (ids is None) == (hard_negative_ids is None),
        InputError,
        "ids are given for pairs or for hard negatives, but not for both.",
        "Give ids and hard_negative_ids, or neither.",
    )
    require(
        ids is None or queue is None or queue.ids is not None,
        InputError,
        "ids are given for pairs, but the queue holds none.",
        "Make the queue with KeyQueue(..., ids=True), or give no ids.",
    )
