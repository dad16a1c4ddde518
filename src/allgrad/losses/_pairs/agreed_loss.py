"""The loss of pairs for other losses, whose ranks have agreed on their arguments already."""

from __future__ import annotations

from typing import TYPE_CHECKING

from allgrad.losses._arguments.rank_args import GradNeeds
from allgrad.losses._pairs.alone_on_cuda import loss_of_one_rank
from allgrad.losses._pairs.config import LossConfig
from allgrad.losses._pairs.engine import contrastive_loss
from allgrad.losses._pairs.key_blocks import KeyLayout

if TYPE_CHECKING:
    from torch import Tensor

    from allgrad.losses._arguments.agreement import Agreement
    from allgrad.losses._kind import LossKind
    from allgrad.losses._pairs.global_loss import GradReduction
    from allgrad.types import GroupLike

__all__ = ["agreed_loss"]


def agreed_loss(
    name: str,
    kind: LossKind,
    agreed: Agreement,
    *,
    pairs: tuple[int, ...],
    keys: tuple[int, ...],
    needs: GradNeeds,
    query: Tensor,
    key: Tensor,
    scale: Tensor,
    grad_reduction: GradReduction,
    group: GroupLike,
) -> Tensor:
    """The loss of each query among the keys of all ranks, whose numbers on each rank are given.

    ``needs`` are those of any rank: they decide which messages are sent.
    """
    found = loss_of_one_rank(
        name,
        kind,
        {"query": query, "key": key},
        {"scale": scale},
        grad_reduction=grad_reduction,
        sizes=None,
        group=group,
    )
    if found is not None:
        return found
    config = LossConfig(
        name,
        kind,
        KeyLayout(agreed.rank, keys, group),
        pairs,
        grad_reduction=grad_reduction,
        needs_key_grad=GradNeeds.KEYS in needs,
        needs_grad=GradNeeds.ANY in needs,
        ring=False,
        agreed=None if len(pairs) == 1 else agreed,
    )
    return contrastive_loss(config, query, key, scale, None)
