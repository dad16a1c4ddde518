"""Losses with several positives: keys with the query's id, among the keys of all ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch

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
from allgrad.losses._arguments.same_numbers import compared_numbers
from allgrad.losses._graphs.in_graphs import in_graphs
from allgrad.losses._rows.global_mean import GlobalMean
from allgrad.losses._rows.relations import Keys, Queries, Relation, score_rows, taken_apart
from allgrad.losses._rows.row_losses import weighted_sums
from allgrad.losses.key_queue import check_queue, queued_keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from allgrad.losses._arguments.agreement import Agreement
    from allgrad.losses._kind import Activation
    from allgrad.losses._pairs.global_loss import GradReduction
    from allgrad.losses.key_queue import KeyQueue
    from allgrad.types import GroupLike

__all__ = ["sigmoid_supcon_loss", "supcon_loss"]


@in_graphs
def supcon_loss(
    query: Tensor,
    key: Tensor,
    scale: Tensor | float,
    query_ids: Tensor,
    key_ids: Tensor,
    *,
    query_weights: Tensor | None = None,
    key_weights: Tensor | None = None,
    exclude_self: bool = False,
    margin: float | None = None,
    queue: KeyQueue | None = None,
    grad_reduction: GradReduction = "mean",
    group: GroupLike = None,
) -> Tensor:
    """Cross entropy of each query's positives among the keys of all ranks (SupCon).

        rank 0   query [ a a ]     key [ a a ]           loss of [ a a | b | c c c ]
        rank 1   query [ b ]       key [ b ]      --->   loss of [ a a | b | c c c ]
        rank 2   query [ c c c ]   key [ c c c ]         loss of [ a a | b | c c c ]

    A key with the query's id is a positive, every other key a negative. Ids are classes, samples or
    captions. A query's loss is the mean over its positives of ``-log softmax(scores)[positive]``,
    and the result the mean over all queries that have a positive. Queries and keys may differ in
    number. ``exclude_self`` leaves out query i's own key i: ``supcon_loss(x, x, scale, labels,
    labels, exclude_self=True)`` is the loss of one set of samples.

    ``query_weights`` weigh the queries in the result, ``key_weights`` the positives of a query; positives
    whose weights add up to zero or less are none. A negative whose similarity, before the scale, is above
    the query's highest positive minus ``margin`` counts as a false negative and is left out. ``queue``
    adds the keys of earlier steps.

    Gradient: exactly that of the joined batch, once the ranks' gradients are averaged
    (``grad_reduction="mean"``: DDP, FSDP) or summed (``"sum"``), of any order. A margin's choice of
    negatives has no derivative.

    Cost: one gather of keys with ids, one sum of two numbers; backward one message; one small message more
    unless the call is expected, as in a loop over equal batches. Scores exist in chunks, computed in
    forward and again in backward; up to 2 million on a rank (on a device 16 million) are kept instead. A
    margin computes them once more.
    """
    return _several_positives(
        "supcon_loss",
        "softmax",
        {"query": query, "key": key},
        {"scale": scale},
        {"query_ids": query_ids, "key_ids": key_ids},
        {"query_weights": query_weights, "key_weights": key_weights},
        Relation(by_ids=True, exclude_self=exclude_self, margin=margin),
        queue,
        grad_reduction,
        group,
    )


@in_graphs
def sigmoid_supcon_loss(
    query: Tensor,
    key: Tensor,
    scale: Tensor | float,
    query_ids: Tensor,
    key_ids: Tensor,
    *,
    bias: Tensor | float | None = 0.0,
    query_weights: Tensor | None = None,
    key_weights: Tensor | None = None,
    exclude_self: bool = False,
    margin: float | None = None,
    queue: KeyQueue | None = None,
    grad_reduction: GradReduction = "mean",
    group: GroupLike = None,
) -> Tensor:
    """Binary cross entropy of each query with each key of all ranks: whether they have one id.

    A query's k positives count 1/k each, its negatives 1 each; the result is the mean over queries.
    With one positive for each query it is ``siglip_loss``. Queries, keys, other arguments, gradient
    and cost: see ``supcon_loss``. A query without a positive counts too.
    """
    return _several_positives(
        "sigmoid_supcon_loss",
        "sigmoid",
        {"query": query, "key": key},
        {"scale": scale, "bias": 0.0 if bias is None else bias},
        {"query_ids": query_ids, "key_ids": key_ids},
        {"query_weights": query_weights, "key_weights": key_weights},
        Relation(by_ids=True, exclude_self=exclude_self, margin=margin),
        queue,
        grad_reduction,
        group,
    )


def _several_positives(  # noqa: PLR0917
    name: str,
    kind: Activation,
    features: dict[str, Tensor],
    numbers: dict[str, Tensor | float],
    ids: dict[str, Tensor],
    weights: dict[str, Tensor | None],
    relation: Relation,
    queue: KeyQueue | None,
    grad_reduction: GradReduction,
    group: GroupLike,
) -> Tensor:
    query, key = features.values()
    query_ids, key_ids = ids.values()
    query_weights, key_weights = weights.values()

    def check() -> CallSpec:
        check_features(features)
        for which, x in numbers.items():
            check_number(which, x)
        check_options(grad_reduction, relation.margin)
        require(
            query_ids is not None and key_ids is not None,
            InputError,
            "ids are missing on one side, or on both.",
            "Give query_ids and key_ids.",
        )
        sides = (("query", query, query_ids, query_weights), ("key", key, key_ids, key_weights))
        for side, x, its_ids, its_weights in sides:
            check_per_row(f"{side}_ids", its_ids, side, len(x), whole=True)
            check_per_row(f"{side}_weights", its_weights, side, len(x), whole=False)
        require_device({**ids, **weights}, "query", query)
        require(
            not relation.exclude_self or len(query) == len(key),
            PieceMismatch,
            f"exclude_self needs one key for each query, not {len(key)} for {len(query)}.",
            "Give the same rows as query and key.",
        )
        check_queue(queue, query)
        if queue is not None:
            require(
                queue.ids is not None,
                InputError,
                "the queue holds no ids.",
                "Make it with KeyQueue(..., ids=True).",
            )
        same = {
            "width": query.shape[1],
            "dtype": query.dtype,
            **grad_mode(),
            "options": options_text(
                exclude_self=bool(relation.exclude_self),
                margin=plain_number(relation.margin),
                grad_reduction=grad_reduction,
                query_weights=query_weights is not None,
                key_weights=None if key_weights is None else key_weights.dtype,
            ),
            "queue": "no queue" if queue is None else queue.spec(),
            **compared_numbers(numbers, query),
        }
        return CallSpec(same, (len(query), len(key)))

    def compute(agreed: Agreement) -> Tensor:
        sizes = agreed.column(1)
        if not sum(agreed.column(0)) or not sum(sizes):
            raise InputError(
                f"{name}: no rank has a query and a key.\nGive at least one rank both."
            )
        common = key.dtype
        if key_weights is not None:  # in one message, in a dtype that holds both
            common = torch.promote_types(key.dtype, key_weights.dtype)
        parts = [Part(key.to(common), sizes), Part(key_ids.long(), sizes)]
        if key_weights is not None:
            parts.append(Part(key_weights.to(common), sizes))
        is_own = None
        if relation.exclude_self:
            first = sum(sizes[: agreed.rank])
            is_own = torch.arange(first, first + len(query), device=query.device)
        # As they are now: backward computes with them again.
        own_ids = query_ids.long().clone()
        queued, columns_of = taken_apart(queued_keys(queue, sum(sizes), query))
        dtype = key.dtype

        margin, count = cast("float | None", plain_number(relation.margin)), len(numbers)
        applied = replace(relation, margin=margin)

        def sums(
            joined: list[Tensor], constants: Sequence[Tensor], query: Tensor, *others: Tensor
        ) -> Tensor:
            keys, ids, *weights = joined
            rows = Queries(query, constants[0], is_own)
            new = Keys(keys.to(dtype), ids, weights[0] if weights else None)
            columns = [new, *columns_of(constants[1:])]
            scalars, its_weights = others[:count], others[count:]
            losses = score_rows(kind, applied, rows, columns, *scalars)
            return weighted_sums(losses, its_weights[0] if its_weights else None)

        mean = GlobalMean(name, agreed.rank, Packing(parts, agreed), sums, grad_reduction, group)
        more = () if query_weights is None else (query_weights,)
        constants = [own_ids, *queued]
        return mean(query, *map(number, numbers.values()), *more, constants=constants)

    shown = {**features, **ids, **weights, **numbers, "queue": queue}
    return agree_and(name, shown, check, group, compute)
