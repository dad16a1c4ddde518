"""InfoNCE with in-batch, hard and queued negatives, in one direction or in both."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from allgrad._autograd.transforms import is_plain_autograd
from allgrad.errors import InputError, PieceMismatch
from allgrad.losses._arguments.agreement import CallSpec, agree_and, grad_mode, require
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
from allgrad.losses._arguments.rank_args import GradNeeds, grad_needs
from allgrad.losses._arguments.same_numbers import compared_numbers
from allgrad.losses._computed_on import computed_on
from allgrad.losses._graphs.in_graphs import in_graphs
from allgrad.losses._kind import LossKind
from allgrad.losses._pairs.agreed_loss import agreed_loss
from allgrad.losses._rows.global_mean import GlobalMean
from allgrad.losses._rows.relations import Keys, Queries, Relation, score_rows, taken_apart
from allgrad.losses._rows.row_losses import weighted_sums
from allgrad.losses.key_queue import check_queue, queued_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
    Without ids, weights, margin and queue it is ``info_nce_loss``, or ``clip_loss`` if ``symmetric`` and no
    rank has hard negatives, and computed as these are: their cost, and first and second derivatives.
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
            **grad_mode(),
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
        needs = grad_needs([query, key, hard_negatives], [scale])
        return CallSpec(same, (len(query), hard, int(needs)))

    def compute(agreed: Agreement) -> Tensor:
        pairs = agreed.column(0)
        if not sum(pairs):
            raise InputError(
                "multiple_negatives_loss: no rank has a pair.\nGive at least one rank a pair."
            )
        keys = tuple(a + b for a, b, _ in agreed.counts)
        candidates = _candidates(key, hard_negatives)
        is_plain = ids is None and weights is None and margin is None and queue is None
        if is_plain and not (symmetric and keys != pairs) and is_plain_autograd():
            kind = LossKind.SOFTMAX_BOTH if symmetric else LossKind.SOFTMAX_ROWS
            return agreed_loss(
                name,
                kind,
                agreed,
                pairs=pairs,
                keys=keys,
                needs=GradNeeds(reduce(or_, agreed.column(2))),
                query=query,
                key=candidates,
                scale=number(scale),
                grad_reduction=grad_reduction,
                group=group,
            )
        parts, own_ids = [Part(candidates, keys)], []
        if ids is not None:
            parts.append(Part(_candidates(ids, hard_negative_ids).long(), keys))
            own_ids.append(ids.long().clone())
        if symmetric:
            parts.append(Part(query, pairs))
            parts += [Part(x, pairs) for x in own_ids]
        relation = Relation(by_ids=False, margin=cast("float | None", plain_number(margin)))
        queued, columns_of = taken_apart(queued_keys(queue, sum(keys), query))
        sizes = (keys, pairs) if symmetric else (keys,)
        sums = _sums(agreed.rank, relation, sizes, columns_of, with_ids=ids is not None)
        mean = GlobalMean(name, agreed.rank, Packing(parts, agreed), sums, grad_reduction, group)
        more = () if weights is None else (weights,)
        # As they are now: backward computes with them again.
        return mean(query, key, number(scale), *more, constants=[*own_ids, *queued])

    name = "multiple_negatives_loss"
    shown = {**features, **all_ids, "scale": scale, "queue": queue}
    return agree_and(name, shown, check, group, compute)


def _sums(
    rank: int,
    relation: Relation,
    sizes: tuple[tuple[int, ...], ...],
    columns_of: Callable[[Sequence[Tensor]], list[Keys]],
    *,
    with_ids: bool,
) -> Callable[..., Tensor]:
    """What the mean is made of; ``sizes`` are the columns of the ranks in each direction."""

    def direction(
        rows: Queries, sizes: tuple[int, ...], joined: list[Tensor], old: list[Keys], scale: Tensor
    ) -> Tensor:
        """The losses of rows, whose own column is its rank's first candidate and so on."""
        columns, *column_ids = joined
        first = sum(sizes[:rank])
        own = torch.arange(first, first + len(rows.features), device=columns.device)
        new = Keys(columns, column_ids[0] if column_ids else None)
        return score_rows("pairs", relation, replace(rows, own=own), [new, *old], scale)

    def sums(
        joined: list[Tensor],
        constants: Sequence[Tensor],
        query: Tensor,
        key: Tensor,
        scale: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        ids, old = (constants[0], constants[1:]) if with_ids else (None, constants)
        each, rows = len(joined) // len(sizes), Queries(query, ids, None)
        losses = direction(rows, sizes[0], joined[:each], columns_of(old), scale)
        if len(sizes) > 1:
            rows = Queries(key, ids, None)
            losses = (losses + direction(rows, sizes[1], joined[each:], [], scale)) / 2
        return weighted_sums(losses, weights[0] if weights else None)

    return sums


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
