"""Which loss to compute over which batch, and what its forward keeps for the gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from allgrad.losses._tiles.torch import Weights

if TYPE_CHECKING:
    from torch import Tensor

    from allgrad.losses._arguments.agreement import Agreement
    from allgrad.losses._kind import LossKind
    from allgrad.losses._pairs.key_blocks import KeyBlock, KeyLayout

__all__ = ["LossConfig", "Sums"]


@dataclass(frozen=True, slots=True)
class LossConfig:
    """Which loss to compute, and over which batch; the same on every rank but for ``layout.rank``."""

    name: str
    kind: LossKind
    layout: KeyLayout
    pairs: tuple[int, ...]  # by rank
    label_smoothing: float = 0.0
    grad_reduction: str = "mean"
    needs_key_grad: bool = True  # on any rank
    needs_grad: bool = True  # of any input, on any rank
    ring: bool | None = None
    budget: int = 0
    agreed: Agreement | None = None  # whose row travels with the first gather

    @property
    def smoothing(self) -> float:
        """Label smoothing, summed over the directions of the loss."""
        return self.kind.directions * self.label_smoothing

    @property
    def mean_factor(self) -> float:
        """Turns the sum of all terms into their mean."""
        return 1 / (self.kind.directions * sum(self.pairs))

    @property
    def sums_loss_weights(self) -> bool:
        """Whether the weights that the ranks give to the loss must be summed.

        With "mean" the objective is the sum over ranks of what each rank makes of the loss: W times
        the loss, or any other weighting (test_ranks_may_weigh_the_loss_differently).
        """
        return self.grad_reduction == "mean" and self.layout.world > 1

    def weights(self, sums: Sums) -> Weights:
        smoothing = self.smoothing / sum(self.layout.sizes)
        pair_weights = sums.pair_weights - smoothing if smoothing else sums.pair_weights
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
