"""InfoNCE with in-batch, hard and queued negatives, in one direction or in both."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from allgrad.errors import InputError, PieceMismatch
from allgrad.losses._arguments.agreement import CallSpec, agree_and, require
from allgrad.losses._arguments.feature_checks import (
    check_features,
    check_number,
    check_options,
    check_per_row,
    number,
    options_text,
    plain_number,
    require_device,
)
from allgrad.losses._arguments.packed import Packing, Part
from allgrad.losses._arguments.same_numbers import compared_numbers
from allgrad.losses._computed_on import computed_on
from allgrad.losses._graphs.in_graphs import in_graphs
from allgrad.losses._rows.global_mean import GlobalMean
from allgrad.losses._rows.relations import Keys, Queries, Relation, score_rows, tensors_of
from allgrad.losses._rows.row_losses import weighted_sums
from allgrad.losses.key_queue import check_queue, queued_keys

if TYPE_CHECKING:
    from allgrad.losses._arguments.agreement import Agreement
    from allgrad.losses._pairs.global_loss import GradReduction
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

    Query i and key i are a pair. The other keys, the hard negatives of all ranks, (rows, width) or
    (pairs, n, width) with ids (pairs, n), and the ``queue`` are negatives of all queries. ``symmetric`` takes the mean with the cross entropy of each key among
    the queries of all ranks.

    Not every other key is a negative: with ``ids``, one for each pair, keys with the query's id are
    left out (the same caption twice); hard negatives and the queue then need ids too. With
    ``margin``, negatives are left out whose similarity, before the scale, is above that of the pair
    minus the margin. ``weights``, one for each pair, weigh the pairs in the mean.

    Gradient and cost: see ``supcon_loss``; ``symmetric`` doubles what is sent and computed, not the messages.
    """
    hard_negatives, hard_negative_ids = _in_rows(hard_negatives, hard_negative_ids)
    features = {"query": query, "key": key, "hard_negatives": hard_negatives}
    all_ids = {"ids": ids, "hard_negative_ids": hard_negative_ids}

    def check() -> CallSpec:
        check_features(features, optional=["hard_negatives"])
        check_number("scale", scale)
        check_options(grad_reduction, margin)
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
        require_device({**all_ids, "weights": weights}, "query", query)
        _check_both_sides(ids, hard_negatives, hard_negative_ids, queue)
        check_queue(queue, query)
        same = {
            "width": query.shape[1],
            "dtype": query.dtype,
            "options": options_text(
                symmetric=bool(symmetric),
                margin=plain_number(margin),
                grad_reduction=grad_reduction,
                ids=ids is not None,
                weights=weights is not None,
            ),
            "queue": "no queue" if queue is None else queue.spec(),
            **compared_numbers({"scale": scale}, query),
        }
        return CallSpec(same, (len(query), hard))

    def compute(agreed: Agreement) -> Tensor:
        pairs = agreed.column(0)
        if not sum(pairs):
            raise InputError(
                "multiple_negatives_loss: no rank has a pair.\nGive at least one rank a pair."
            )
        relation = Relation(by_ids=False, margin=cast("float | None", plain_number(margin)))
        keys = tuple(a + b for a, b in agreed.counts)
        parts = [Part(_candidates(key, hard_negatives), keys)]
        if ids is not None:
            parts.append(Part(_candidates(ids, hard_negative_ids).long(), keys))
        if symmetric:
            parts.append(Part(query, pairs))
            if ids is not None:
                parts.append(Part(ids.long(), pairs))
        # As they are now: backward computes with them again.
        own_ids = None if ids is None else ids.long().clone()
        earlier = queued_keys(queue, sum(keys), query)

        def direction(
            rows: Tensor, joined: list[Tensor], sizes: tuple[int, ...], factor: Tensor, old: bool
        ) -> tuple[Tensor, Tensor]:
            """The loss of each row, whose own column is its rank's first candidate and so on."""
            columns, *column_ids = joined
            first = sum(sizes[: agreed.rank])
            own = torch.arange(first, first + len(rows), device=rows.device)
            new = Keys(columns, column_ids[0] if column_ids else None)
            blocks = [new, *earlier] if old else [new]
            queries = Queries(rows, own_ids, own)
            return score_rows("pairs", relation, queries, blocks, factor)

        def sums(
            joined: list[Tensor], query: Tensor, key: Tensor, factor: Tensor, *weights: Tensor
        ) -> Tensor:
            each = len(joined) // 2 if symmetric else len(joined)
            losses, counted = direction(query, joined[:each], keys, factor, old=True)
            if symmetric:
                back, _ = direction(key, joined[each:], pairs, factor, old=False)
                losses = (losses + back) / 2
            return weighted_sums(losses, counted, weights[0] if weights else None)

        packing, old = Packing(parts, agreed), tensors_of(earlier)
        mean = GlobalMean(name, agreed.rank, packing, sums, grad_reduction, group, old)
        return mean(query, key, number(scale), *(() if weights is None else (weights,)))

    name = "multiple_negatives_loss"
    shown = {**features, **all_ids, "scale": scale, "queue": queue}
    return agree_and(name, shown, check, group, compute)


def _in_rows(negatives: Tensor | None, ids: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Those of each pair, (pairs, n, width), as rows; what is no dense tensor is refused later."""
    return _flat(negatives, 3), _flat(ids, 2)


def _flat(x: Tensor | None, dims: int) -> Tensor | None:
    if not isinstance(x, Tensor) or x.layout != torch.strided or x.is_nested or x.dim() != dims:
        return x
    return x.flatten(0, 1)


def _candidates(of_pairs: Tensor, hard: Tensor | None) -> Tensor:
    """The keys of pairs, and behind them the hard negatives; or the ids of both."""
    if hard is None:
        return of_pairs
    return computed_on(of_pairs.device, torch.cat, [of_pairs, hard])  # type: ignore[no-any-return]


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
