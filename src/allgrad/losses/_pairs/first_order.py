"""The loss and its first derivatives: the choice of the pass over the scores.

| scores of a rank | pass |
|---|---|
| of all ranks very few, CPU | every rank computes all of them, and its gradients (whole_pass) |
| softmax along rows or sigmoid, CPU | some rows at a time, and their gradients (panel_pass) |
| few enough to keep, CUDA | one matrix product and fused kernels (fused_pass) |
| few enough to keep | one tile in plain torch (score_pass) |
| more, or keys around a ring | many tiles, computed again in backward (score_pass) |

The gradients are computed in forward, and backward only multiplies them, where the messages allow it
and it saves something: SIGMOID in tiles computes its scores once; one rank alone with few scores has
its work done by the thread that runs, before autograd wakes another.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from allgrad.collectives.all_reduce import all_reduce
from allgrad.losses._pairs.config import Sums
from allgrad.losses._pairs.fused_pass import FusedPass, kept_scores
from allgrad.losses._pairs.key_blocks import GatheredKeys, KeyBlock, key_blocks, needs_ring
from allgrad.losses._pairs.panel_pass import PanelPass, has_panels
from allgrad.losses._pairs.score_pass import ScorePass
from allgrad.losses._pairs.whole_pass import is_small, loss_and_gradients, times_weight
from allgrad.losses._tiles.accumulators import times
from allgrad.losses._tiles.torch import has_kernels

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from allgrad.losses._pairs.config import LossConfig
    from allgrad.losses._tiles.one_rank import Products

__all__ = ["Inputs", "Kept", "first_gradients", "keeps_scores", "loss_value", "one_rank_kernels"]


class Inputs(NamedTuple):
    """What a loss is differentiated by."""

    q: Tensor
    k: Tensor
    scale: Tensor
    bias: Tensor | None


class Kept(NamedTuple):
    """What forward keeps for backward."""

    joined: Tensor | None = None  # the keys of all ranks, unless they go around a ring
    sums: Sums | None = None
    states: tuple[Tensor | None, ...] = ()  # of the tiles, or the matrix of a fused pass
    prepared: tuple[Tensor | None, ...] | None = None  # gradients, before the incoming one
    products: Products | None = None  # the same of one rank alone, on a CUDA device

    def flatten(self) -> tuple[Tensor | None, ...]:
        """All tensors, for autograd to save."""
        if self.products is not None:
            return self.products
        return self.joined, *(self.sums or _NONE[:3]), *(self.prepared or _NONE), *self.states

    @staticmethod
    def unflatten(tensors: Sequence[Tensor | None]) -> Kept:
        if len(tensors) == 3:
            return Kept(products=one_rank_kernels().Products(*tensors))
        joined, row_lse, column_lse, pair_weights, *others = tensors
        if pair_weights is None:
            return Kept(prepared=tuple(others[:4]))
        return Kept(joined, Sums(row_lse, column_lse, pair_weights), tuple(others[4:]))


_NONE = (None,) * 4


@cache
def one_rank_kernels() -> Any:
    """Imported when it is needed: Triton takes a while."""
    from allgrad.losses._tiles import one_rank

    return one_rank


def keeps_scores(config: LossConfig, q: Tensor, *, ring: bool) -> bool:
    """Whether the scores are kept from forward to backward; the same on all ranks.

    With SIGMOID, it decides the order of the messages.
    """
    scores = max(config.pairs) * sum(config.layout.sizes)
    return not ring and scores <= kept_scores(q, alone=config.layout.world == 1)


def loss_value(config: LossConfig, x: Inputs, needed: Sequence[bool]) -> tuple[Tensor, Kept]:
    """The loss, and what its gradients need."""
    if is_small(config, x.q):
        loss, gradients = loss_and_gradients(config, *x, needed)
        return loss, Kept(prepared=gradients)
    ring = needs_ring(config.layout, x.k, config.budget, config.ring)
    keys = key_blocks(config.layout, x.k, ring=ring, agreed=config.agreed)
    joined = keys.block.k if isinstance(keys, GatheredKeys) else None
    if joined is not None and has_panels(config, x.q, ring=ring):
        loss, gradients = PanelPass(config, *x, joined).run(needed)
        return loss, Kept(prepared=gradients)
    keep = keeps_scores(config, x.q, ring=ring)
    if isinstance(keys, GatheredKeys) and keep and len(x.q) and has_kernels(x.q):
        if config.layout.world == 1 and config.needs_grad:
            return _alone(config, x, needed)
        fused = FusedPass(config, x.q, x.scale, x.bias, keys.block)
        loss, matrix, sums = fused.loss()
        return loss, Kept(joined, sums, (matrix,))
    scores = ScorePass(config, *x, keys=keys, keep=keep)
    loss, found, prepared = scores.loss(needed)
    if prepared is not None:  # backward needs neither the keys nor the sums
        return loss, Kept(prepared=prepared)
    return loss, Kept(joined, found, tuple(scores.states))


def first_gradients(
    config: LossConfig, x: Inputs, by_loss: Tensor, kept: Kept, needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """The gradients by queries, keys, scale and bias of all ranks' weights times the loss."""
    if not config.needs_grad:  # of any rank
        return (None,) * 4
    dtype = x.q.dtype
    if kept.products is not None:
        return one_rank_kernels().gradients(config.kind, *x, by_loss, kept.products)  # type: ignore[no-any-return]
    weight = by_loss if config.sums_loss_weights else None
    if kept.prepared is not None:
        if weight is not None:
            by_loss = all_reduce(weight, group=config.layout.group, grad="none")
        ring = needs_ring(config.layout, x.k, config.budget, config.ring)
        if is_small(config, x.q) or has_panels(config, x.q, ring=ring):
            return times_weight(config, kept.prepared, by_loss, x.scale, dtype)
        return _times(kept.prepared, by_loss, dtype)
    assert kept.sums is not None
    ring = kept.joined is None
    keep = keeps_scores(config, x.q, ring=ring)
    if kept.joined is not None and keep and len(x.q) and has_kernels(x.q):
        (matrix,) = kept.states
        assert matrix is not None
        block = KeyBlock(0, kept.joined, 0, config.layout.start)
        fused = FusedPass(config, x.q, x.scale, x.bias, block)
        return fused.gradients_of_ranks(needed, by_loss, matrix, kept.sums)
    keys = key_blocks(config.layout, x.k, ring=ring, joined=kept.joined)
    scores = ScorePass(config, *x, keys=keys, keep=keep, states=kept.states)
    if weight is None:
        factor = config.mean_factor * by_loss
        return scores.gradients(needed, factor, kept.sums, dtype=dtype)[:-1]
    factor = x.scale.new_full((), config.mean_factor)
    *found, total = scores.gradients(
        needed, factor, kept.sums, dtype=scores.dtype, own_terms=weight
    )
    assert total is not None
    return _times(found, total, dtype)


def _alone(config: LossConfig, x: Inputs, needed: Sequence[bool]) -> tuple[Tensor, Kept]:
    loss, products = one_rank_kernels().loss_and_products(
        config.kind,
        *x,
        smoothing=config.smoothing,
        needs_query_grad=needed[0],
        needs_key_grad=config.needs_key_grad,
    )
    return loss, Kept(products=products)


def _times(
    gradients: Sequence[Tensor | None], factor: Tensor, dtype: torch.dtype
) -> tuple[Tensor | None, ...]:
    """The gradients by queries and keys, in ``dtype``, and by scale and bias, times ``factor``."""
    dtypes = dtype, dtype, factor.dtype, factor.dtype
    return tuple(
        None if x is None else times(x, factor, dtype)
        for x, dtype in zip(gradients, dtypes, strict=True)
    )
