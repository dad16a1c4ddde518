"""Contrastive losses over the pairs of all ranks, with exact gradients: one engine for every kind.

The score matrix has a row for each query and a column for each key of all ranks. Each rank computes
the rows of its own queries, in tiles, once per pass:

                 keys of rank 0    of rank 1    of rank 2
    rank 0       [ scores          scores       scores ]     its queries
    rank 1       [ scores          scores       scores ]     its queries
    rank 2       [ scores          scores       scores ]     its queries

Sums along rows are complete on one rank. Sums along columns are combined by a logsumexp over ranks.
Gradients of keys are summed over ranks, and each rank receives the sum for its own keys. So a step
makes three collective calls:

    forward     keys                         all_gather
                column sums, and the loss    all_gather
    backward    gradients of keys, and the   reduce_scatter
                weights that the ranks give to the loss

The score of a pair is kept out of these sums. With ``negatives`` for the logsumexp of the other
scores, a pair's term of the loss is

    log(1 + exp(negatives - score of the pair))

It keeps its digits even if the pair's score is far above the others and the loss is close to zero;
a difference of two large sums would be noise (test_tiny_loss_of_saturated_scores_keeps_its_digits).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from allgrad.collectives.all_reduce import all_reduce
from allgrad.errors import ModeError
from allgrad.losses._config import Sums
from allgrad.losses._score_pass import ScorePass
from allgrad.losses._tiles.accumulators import accumulator_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from allgrad.losses._config import LossConfig

__all__ = ["contrastive_loss"]


def contrastive_loss(
    config: LossConfig, q: Tensor, k: Tensor, scale: Tensor, bias: Tensor | None
) -> Tensor:
    """The loss of all pairs, on every rank. Query i and key i are a pair; more keys may follow."""
    dtype = accumulator_dtype(q.dtype)
    scale = scale.reshape(()).to(q.device, dtype)
    bias = None if bias is None else bias.reshape(()).to(q.device, dtype)
    # An input that always requires grad lets every rank take part in backward, even one whose
    # features need no gradient (test_rank_without_gradient_takes_part).
    anchor = torch.empty(0, requires_grad=True)
    loss: Tensor = _ContrastiveLoss.apply(config, anchor, q, k, scale, bias)  # type: ignore[no-untyped-call]
    return loss


class _ContrastiveLoss(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any,
        config: LossConfig,
        anchor: Tensor,  # noqa: ARG004
        q: Tensor,
        k: Tensor,
        scale: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.config, ctx.device = config, q.device.type
        with torch.autocast(ctx.device, enabled=False):
            scores = ScorePass(config, q, k, scale, bias)
            loss, sums, ctx.prepared = scores.loss(ctx.needs_input_grad[2:])
        ctx.keys, ctx.states = scores.keys, scores.states
        ctx.save_for_backward(q, k, scale, bias, *(sums or ()))
        return loss

    @staticmethod
    def backward(ctx: Any, by_loss: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad(), torch.autocast(ctx.device, enabled=False):
            gradients = _gradients(ctx, by_loss)
        if torch.is_grad_enabled():  # create_graph=True
            # The inputs of the refusal are what the gradients depend on, so that it is on every path
            # of the graph and autograd cannot prune it (test_second_derivative_is_refused).
            q, k, scale, bias = ctx.saved_tensors[:4]
            inputs = q, k, scale, bias, by_loss
            gradients = _FirstOrderOnly.apply(ctx.config.name, *inputs, *gradients)  # type: ignore[no-untyped-call]
        return None, None, *gradients


def _gradients(ctx: Any, by_loss: Tensor) -> tuple[Tensor | None, ...]:
    config: LossConfig = ctx.config
    q, k, scale, bias, *sums = ctx.saved_tensors
    weight = by_loss if config.sums_loss_weights else None
    if ctx.prepared is not None:
        if weight is not None:
            by_loss = all_reduce(weight, group=config.layout.group)
        return _times(ctx.prepared, by_loss, q.dtype)
    scores = ScorePass(config, q, k, scale, bias, keys=ctx.keys, states=ctx.states)
    needed = ctx.needs_input_grad[2:]
    if weight is None:
        factor = config.mean_factor * by_loss
        return scores.gradients(needed, factor, Sums(*sums), dtype=q.dtype)[:-1]
    factor = scale.new_full((), config.mean_factor)
    *found, total = scores.gradients(
        needed, factor, Sums(*sums), dtype=scores.dtype, own_term=weight
    )
    assert total is not None
    return _times(found, total, q.dtype)


def _times(
    gradients: Sequence[Tensor | None], factor: Tensor, dtype: torch.dtype
) -> tuple[Tensor | None, ...]:
    """The gradients by queries and keys, in ``dtype``, and by scale and bias, times ``factor``."""
    dtypes = dtype, dtype, factor.dtype, factor.dtype
    return tuple(
        None if x is None else (x * factor).to(dtype)
        for x, dtype in zip(gradients, dtypes, strict=True)
    )


class _FirstOrderOnly(torch.autograd.Function):
    """Gradients that raise when they are differentiated, by anything that they depend on."""

    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any,
        name: str,
        q: Tensor,  # noqa: ARG004
        k: Tensor,  # noqa: ARG004
        scale: Tensor,  # noqa: ARG004
        bias: Tensor | None,  # noqa: ARG004
        by_loss: Tensor,  # noqa: ARG004
        *gradients: Tensor | None,
    ) -> Any:
        ctx.name = name
        return gradients

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise ModeError(
            f"{ctx.name}: this loss has a first derivative only.\nFor higher derivatives, join the "
            "features with allgrad.all_gather and use the formula in allgrad.losses.reference."
        )
