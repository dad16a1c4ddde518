"""One contrastive loss over the pairs of all ranks, and its exact gradient, for all kinds of it.

The scores are a matrix with a row for each query and a column for each key of the whole world.
Each rank computes the rows of its own queries, in tiles, once in a pass:

                 keys of rank 0    of rank 1    of rank 2
    rank 0       [ scores          scores       scores ]     its queries
    rank 1       [ scores          scores       scores ]     its queries
    rank 2       [ scores          scores       scores ]     its queries

Sums along rows are complete on a rank; sums along columns are combined by a logsumexp over ranks,
gradients of keys by a sum that ends on the rank of the key.

The score of a pair is left out of these sums. A pair's term of the loss is then

    log(1 + exp(others - score of the pair))

which keeps its digits where the pair's score is far above the others and the loss next to nothing;
the difference of two large sums would be noise (test_tiny_loss_of_saturated_scores_keeps_its_digits).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from allgrad.collectives.all_gather import all_gather, reduce_scatter
from allgrad.collectives.all_reduce import all_reduce
from allgrad.errors import ModeError
from allgrad.losses._key_blocks import keys_of_all
from allgrad.losses._tiles.accumulators import accumulator
from allgrad.losses._tiles.torch import Gradients, Weights, row_dots, tiles_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from allgrad.losses._key_blocks import Block, Gathered, Place, Ring
    from allgrad.losses._tiles.torch import Tiles

__all__ = ["Contrast", "contrast"]


@dataclass(frozen=True, slots=True)
class Contrast:
    """Which loss, among whom."""

    call: str
    place: Place
    pairs: int  # in the world
    sigmoid: bool = False
    both: bool = False  # softmax along columns too, not only along rows
    smoothing: float = 0.0
    grads: str = "mean"
    wants_keys: bool = True
    wants_any: bool = True
    ring: bool | None = None
    budget: int = 0

    @property
    def sides(self) -> int:
        return 2 if self.both else 1

    @property
    def share(self) -> float:
        """What one term of the sum counts in the mean."""
        return 1 / (self.sides * self.pairs)

    def weights(self, sums: Sums) -> Weights:
        everywhere = self.sides * self.smoothing / sum(self.place.columns)
        return Weights(sums.rows, sums.columns, everywhere, sums.pairs - everywhere)


class Sums(NamedTuple):
    """What a pass finds out and the gradients need; neither rows nor columns for the sigmoid."""

    rows: Tensor | None  # the log of the sum of exp(score), along each row
    columns: Tensor | None  # and along each column of the world
    pairs: Tensor  # what the score of each pair weighs in the gradient

    def of(self, block: Block) -> Sums:
        return self._replace(columns=None if self.columns is None else self.columns[block.columns])


def contrast(what: Contrast, q: Tensor, k: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """The loss of all pairs, on every rank. Query i and key i are a pair; more keys may follow."""
    wide = accumulator(q.dtype)
    number = scale.reshape(()).to(q.device, wide)
    added = None if bias is None else bias.reshape(()).to(q.device, wide)
    loss: Tensor = _Contrast.apply(what, _anchor(), q, k, number, added)  # type: ignore[no-untyped-call]
    return loss


def _anchor() -> Tensor:
    """An input that always requires grad, and gets none.

    With it every rank takes part in backward, even one whose features need no gradient
    (test_rank_without_gradient_takes_part).
    """
    return torch.empty(0, requires_grad=True)


class _Contrast(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any,
        what: Contrast,
        anchor: Tensor,  # noqa: ARG004
        q: Tensor,
        k: Tensor,
        scale: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.what, ctx.device = what, q.device.type
        with torch.autocast(ctx.device, enabled=False):
            run = _Pass(what, q, k, scale, bias)
            if what.sigmoid:
                loss, ctx.prepared = run.sigmoid_loss(ctx.needs_input_grad[2:])
                return loss
            loss, sums = run.softmax_loss()
        ctx.prepared, ctx.keys, ctx.states = None, run.keys, run.states
        ctx.save_for_backward(q, k, scale, *sums)
        return loss

    @staticmethod
    def backward(ctx: Any, by_loss: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad(), torch.autocast(ctx.device, enabled=False):
            gradients = _gradients(ctx, by_loss)
        if torch.is_grad_enabled():  # somebody may want to differentiate them
            gradients = _Once.apply(ctx.what.call, _anchor(), *gradients)  # type: ignore[no-untyped-call]
        return None, None, *gradients


def _gradients(ctx: Any, by_loss: Tensor) -> tuple[Tensor | None, ...]:
    what: Contrast = ctx.what
    # All ranks have the same loss, and "mean" is about the sum of them: W times the loss, or what
    # the ranks make of it (test_ranks_may_weigh_the_loss_differently).
    if what.grads == "mean":
        by_loss = all_reduce(by_loss, group=what.place.group)
    if ctx.prepared is not None:
        return tuple(None if g is None else (g * by_loss).to(dtype) for g, dtype in ctx.prepared)
    q, k, scale, *sums = ctx.saved_tensors
    run = _Pass(what, q, k, scale, None, keys=ctx.keys, states=ctx.states)
    return run.gradients(ctx.needs_input_grad[2:], what.share * by_loss, Sums(*sums), dtype=q.dtype)


class _Once(torch.autograd.Function):
    """Gradients that refuse to be differentiated."""

    @staticmethod
    def forward(ctx: Any, call: str, anchor: Tensor, *gradients: Tensor | None) -> Any:  # noqa: ARG004
        ctx.call = call
        return gradients

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise ModeError(
            f"{ctx.call}: the tiles have a first derivative only.\nFor more, join the features with "
            "allgrad.all_gather and use the formula in allgrad.losses.reference."
        )


class _Pass:
    """One pass over the scores of this rank."""

    def __init__(
        self,
        what: Contrast,
        q: Tensor,
        k: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        *,
        keys: Gathered | Ring | None = None,
        states: list[Tensor | None] | None = None,
    ) -> None:
        self.what, self.q, self.k, self.scale, self.bias = what, q.contiguous(), k, scale, bias
        self.wide = accumulator(q.dtype)
        self.keys = keys or keys_of_all(what.place, k, what.budget, what.ring)
        self.states: list[Tensor | None] = [None] * self.keys.count if states is None else states

    def softmax_loss(self) -> tuple[Tensor, Sums]:
        """The loss, and what its gradients need."""
        what, total = self.what, sum(self.what.place.columns)
        others = self.q.new_full((len(self.q),), -torch.inf, dtype=self.wide)
        columns = others.new_empty(total) if what.both else None
        key_sum = others.new_zeros(self.q.shape[1])
        for block in self.keys.blocks():
            tiles = self._tiles(block)
            by_row, by_column = tiles.lse(columns=what.both)
            self.states[block.number] = tiles.state
            others = torch.logaddexp(others, by_row)
            if columns is not None and by_column is not None:
                columns[block.columns] = by_column
            if what.smoothing:
                key_sum += block.k.sum(0, dtype=self.wide)
        pairs = self._pairs()
        loss = _softplus(others - pairs).sum()
        weights = what.sides * what.smoothing - (others - pairs).sigmoid()
        if what.smoothing:
            all_scores = self.scale * self.q.sum(0, dtype=self.wide).dot(key_sum)
            loss += what.sides * what.smoothing * (pairs.sum() - all_scores / total)
        if columns is not None:
            place = what.place
            own = reduce_scatter(columns, op="logsumexp", sizes=place.columns, group=place.group)
            loss += _softplus(own - pairs).sum()
            weights -= (own - pairs).sigmoid()
            own = torch.logaddexp(own, pairs)
            columns = all_gather(own, sizes=place.columns, group=place.group, grad="none")
        value = all_reduce(loss, group=what.place.group) * what.share
        return value, Sums(torch.logaddexp(others, pairs), columns, weights)

    def sigmoid_loss(
        self, wanted: Sequence[bool]
    ) -> tuple[Tensor, list[tuple[Tensor | None, torch.dtype]]]:
        """The loss and, as nothing has to be summed beforehand, the gradients in the same pass."""
        what = self.what
        prepared: list[tuple[Tensor | None, torch.dtype]] = []
        softplus = self.scale.new_zeros(())
        pairs = self._pairs()
        if what.wants_any:
            # A gradient in float16 could vanish before the scale of the loss arrives to lift it.
            kept = self.wide if self.q.dtype == torch.float16 else self.q.dtype
            share = self.scale.new_tensor(what.share)
            sums = Sums(None, None, -(-pairs).sigmoid())
            found = self.gradients(wanted, share, sums, dtype=kept, softplus=softplus)
            dtypes = (self.q.dtype, self.q.dtype, self.wide, self.wide)
            prepared = list(zip(found, dtypes, strict=True))
        else:
            for block in self.keys.blocks():
                softplus += self._tiles(block).softplus()
        loss = softplus + _softplus(-pairs).sum()
        return all_reduce(loss, group=what.place.group) * what.share, prepared

    def gradients(
        self,
        wanted: Sequence[bool],
        share: Tensor,
        sums: Sums,
        *,
        dtype: torch.dtype,
        softplus: Tensor | None = None,
    ) -> tuple[Tensor | None, ...]:
        """The gradients of queries, keys, scale and bias, ``share`` times those of the sum."""
        what = self.what
        kept = dtype if self.keys.count == 1 else self.wide
        into = Gradients(
            torch.zeros_like(self.q, dtype=kept) if wanted[0] else None,
            [],
            share.new_zeros(()),
            share.new_zeros(()),
            share.new_zeros(()) if softplus is None else softplus,
        )
        gain = share * self.scale

        def visit(block: Block, by_key: list[Tensor]) -> None:
            into.keys = by_key
            self._tiles(block).add_gradients(what.weights(sums.of(block)), gain, into)

        by_key = None
        if what.wants_keys:
            by_key = self.keys.collect(visit, gain, dtype)
        else:
            for block in self.keys.blocks():
                visit(block, [])
        by_query = None if into.queries is None else into.queries.to(dtype)
        return (
            by_query,
            by_key,
            into.scale * share,
            into.bias * share if self.bias is not None else None,
        )

    def _tiles(self, block: Block) -> Tiles:
        state = self.states[block.number]
        return tiles_for(
            self.q,
            block.k,
            self.scale,
            bias=self.bias,
            first_pair=block.first_pair,
            state=state,
        )

    def _pairs(self) -> Tensor:
        """The scores of this rank's pairs."""
        scores = row_dots(self.q, self.k).mul_(self.scale)
        return scores if self.bias is None else scores.add_(self.bias)


def _softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)); torch's own leaves the 1 out for a large x."""
    return torch.logaddexp(x, x.new_zeros(()))
