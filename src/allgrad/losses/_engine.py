"""Contrastive losses over the pairs of all ranks, with exact gradients: one engine for every kind.

The score matrix has a row for each query and a column for each key of all ranks. Each rank computes
the rows of its own queries, in tiles, once per pass:

                 keys of rank 0    of rank 1    of rank 2
    rank 0       [ scores          scores       scores ]     its queries
    rank 1       [ scores          scores       scores ]     its queries
    rank 2       [ scores          scores       scores ]     its queries

Sums along rows are complete on one rank. Sums along columns are combined by a logsumexp over ranks.
Gradients of keys are summed over ranks, and each rank receives the sum for its own keys.

The score of a pair is kept out of these sums. With ``negatives`` for the logsumexp of the other
scores, a pair's term of the loss is

    log(1 + exp(negatives - score of the pair))

It keeps its digits even if the pair's score is far above the others and the loss is close to zero;
a difference of two large sums would be noise (test_tiny_loss_of_saturated_scores_keeps_its_digits).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from allgrad._autograd import call_order
from allgrad._wire import primitives as wire
from allgrad.collectives.all_gather import all_gather, reduce_scatter
from allgrad.collectives.all_reduce import all_reduce
from allgrad.errors import ModeError
from allgrad.losses._key_blocks import key_blocks
from allgrad.losses._kind import LossKind
from allgrad.losses._tiles.accumulators import accumulator_dtype
from allgrad.losses._tiles.torch import Gradients, Weights, row_dots, tiles_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from allgrad.losses._key_blocks import GatheredKeys, KeyBlock, KeyLayout, RingKeys
    from allgrad.losses._tiles.torch import Tiles

__all__ = ["LossConfig", "contrastive_loss"]


@dataclass(frozen=True, slots=True)
class LossConfig:
    """Which loss to compute, and over which batch; the same on every rank but for ``layout.rank``."""

    name: str
    kind: LossKind
    layout: KeyLayout
    pairs: int  # of all ranks
    label_smoothing: float = 0.0
    grad_reduction: str = "mean"
    needs_key_grad: bool = True  # on any rank
    needs_grad: bool = True  # of any input, on any rank
    ring: bool | None = None
    budget: int = 0

    @property
    def smoothing(self) -> float:
        """Label smoothing, summed over the directions of the loss."""
        return self.kind.directions * self.label_smoothing

    @property
    def mean_factor(self) -> float:
        """Turns the sum of all terms into their mean."""
        return 1 / (self.kind.directions * self.pairs)

    def weights(self, sums: Sums) -> Weights:
        smoothing = self.smoothing / sum(self.layout.sizes)
        pair_weights = sums.pair_weights - smoothing
        return Weights(self.kind, sums.row_lse, sums.column_lse, smoothing, pair_weights)


class Sums(NamedTuple):
    """What forward computes and the gradients need. The sigmoid has no logsumexp."""

    row_lse: Tensor | None  # of each row of this rank
    column_lse: Tensor | None  # of each column of all ranks, or of one block
    pair_weights: Tensor  # the derivative by the score of each pair, before label smoothing

    def of(self, block: KeyBlock) -> Sums:
        if self.column_lse is None:
            return self
        return self._replace(column_lse=self.column_lse[block.columns])


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
    if call_order.STATE.gated and loss.requires_grad and config.layout.world > 1:
        (loss,) = call_order.gate((loss,))
    return loss


@call_order.ordered
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
        ctx.config, ctx.device, ctx.prepared = config, q.device.type, None
        ctx.call = wire.resolve(config.name, config.layout.group)
        if ctx.call.size > 1:
            call_order.register(ctx, ctx.call, q)
        with torch.autocast(ctx.device, enabled=False):
            scores = _ScorePass(config, q, k, scale, bias)
            if config.kind is LossKind.SIGMOID:
                loss, ctx.prepared = scores.sigmoid_loss(ctx.needs_input_grad[2:])
                ctx.save_for_backward(q, k, scale, bias)
                return loss
            loss, sums = scores.softmax_loss()
        ctx.keys, ctx.states = scores.keys, scores.states
        ctx.save_for_backward(q, k, scale, bias, *sums)
        return loss

    @staticmethod
    def backward(ctx: Any, by_loss: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.call.size > 1:
            call_order.check(ctx, ctx.call)
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
    # With "mean" the objective is the sum over ranks of what each rank makes of the loss: W times
    # the loss, or any other weighting (test_ranks_may_weigh_the_loss_differently).
    if config.grad_reduction == "mean":
        by_loss = all_reduce(by_loss, group=config.layout.group)
    if ctx.prepared is not None:
        return tuple(None if g is None else (g * by_loss).to(dtype) for g, dtype in ctx.prepared)
    q, k, scale, bias, *sums = ctx.saved_tensors
    scores = _ScorePass(config, q, k, scale, bias, keys=ctx.keys, states=ctx.states)
    factor = config.mean_factor * by_loss
    return scores.gradients(ctx.needs_input_grad[2:], factor, Sums(*sums), dtype=q.dtype)


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


class _ScorePass:
    """One pass over the scores of this rank's queries and all keys."""

    def __init__(
        self,
        config: LossConfig,
        q: Tensor,
        k: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        *,
        keys: GatheredKeys | RingKeys | None = None,
        states: list[Tensor | None] | None = None,
    ) -> None:
        self.config, self.q, self.k, self.scale, self.bias = config, q.contiguous(), k, scale, bias
        self.dtype = accumulator_dtype(q.dtype)
        self.keys = keys or key_blocks(config.layout, k, config.budget, config.ring)
        self.states: list[Tensor | None] = [None] * self.keys.count if states is None else states

    def softmax_loss(self) -> tuple[Tensor, Sums]:
        """The loss, and what its gradients need."""
        config, layout = self.config, self.config.layout
        total = sum(layout.sizes)
        negatives = self.q.new_full((len(self.q),), -torch.inf, dtype=self.dtype)
        both = config.kind is LossKind.SOFTMAX_BOTH
        column_lse = negatives.new_empty(total) if both else None
        key_sum = negatives.new_zeros(self.q.shape[1])
        for block in self.keys.blocks():
            tiles = self._tiles(block)
            block_row_lse, block_column_lse = tiles.lse(config.kind)
            self.states[block.step] = tiles.state
            negatives = torch.logaddexp(negatives, block_row_lse)
            if column_lse is not None and block_column_lse is not None:
                column_lse[block.columns] = block_column_lse
            if config.smoothing:
                key_sum += block.k.sum(0, dtype=self.dtype)
        pairs = self._pair_scores()
        loss = _softplus(negatives - pairs).sum()
        pair_weights = config.smoothing - (negatives - pairs).sigmoid()
        if config.smoothing:
            all_scores = self.scale * self.q.sum(0, dtype=self.dtype).dot(key_sum)
            loss += config.smoothing * (pairs.sum() - all_scores / total)
        if column_lse is not None:
            sizes, group = layout.sizes, layout.group
            own = reduce_scatter(column_lse, op="logsumexp", sizes=sizes, group=group)
            loss += _softplus(own - pairs).sum()
            pair_weights -= (own - pairs).sigmoid()
            own = torch.logaddexp(own, pairs)
            column_lse = all_gather(own, sizes=sizes, group=group, grad="none")
        value = all_reduce(loss, group=layout.group) * config.mean_factor
        return value, Sums(torch.logaddexp(negatives, pairs), column_lse, pair_weights)

    def sigmoid_loss(
        self, needed: Sequence[bool]
    ) -> tuple[Tensor, list[tuple[Tensor | None, torch.dtype]]]:
        """The loss and its gradients in one pass: no sum over all scores is needed first."""
        config = self.config
        found: tuple[Tensor | None, ...] = (None,) * 4
        softplus = self.scale.new_zeros(())
        pairs = self._pair_scores()
        if config.needs_grad:
            # A small gradient could underflow in float16 before backward multiplies it by the loss scale.
            kept = self.dtype if self.q.dtype == torch.float16 else self.q.dtype
            factor = self.scale.new_tensor(config.mean_factor)
            sums = Sums(None, None, -(-pairs).sigmoid())
            found = self.gradients(needed, factor, sums, dtype=kept, softplus=softplus)
        else:
            for block in self.keys.blocks():
                softplus += self._tiles(block).softplus()
        loss = softplus + _softplus(-pairs).sum()
        dtypes = (self.q.dtype, self.q.dtype, self.dtype, self.dtype)
        prepared = list(zip(found, dtypes, strict=True))
        return all_reduce(loss, group=config.layout.group) * config.mean_factor, prepared

    def gradients(
        self,
        needed: Sequence[bool],
        factor: Tensor,
        sums: Sums,
        *,
        dtype: torch.dtype,
        softplus: Tensor | None = None,
    ) -> tuple[Tensor | None, ...]:
        """The gradients by queries, keys, scale and bias of ``factor`` times the sum of all terms."""
        config = self.config
        kept = dtype if self.keys.count == 1 else self.dtype
        into = Gradients(
            torch.zeros_like(self.q, dtype=kept) if needed[0] else None,
            [],
            factor.new_zeros(()),
            factor.new_zeros(()),
            factor.new_zeros(()) if softplus is None else softplus,
        )
        gain = factor * self.scale

        def add_block(block: KeyBlock, by_key: list[Tensor]) -> None:
            into.keys = by_key
            self._tiles(block).add_gradients(config.weights(sums.of(block)), gain, into)

        by_key = None
        if config.needs_key_grad:
            by_key = self.keys.gradients(add_block, gain, dtype)
        else:
            for block in self.keys.blocks():
                add_block(block, [])
        by_query = None if into.queries is None else into.queries.to(dtype)
        return (
            by_query,
            by_key,
            into.scale * factor,
            into.bias * factor if self.bias is not None else None,
        )

    def _tiles(self, block: KeyBlock) -> Tiles:
        return tiles_for(
            self.q,
            block.k,
            self.scale,
            bias=self.bias,
            first_pair=block.first_pair,
            state=self.states[block.step],
        )

    def _pair_scores(self) -> Tensor:
        scores = row_dots(self.q, self.k).mul_(self.scale)
        return scores if self.bias is None else scores.add_(self.bias)


def _softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), exact for large x too: torch's own then returns x."""
    return torch.logaddexp(x, x.new_zeros(()))
