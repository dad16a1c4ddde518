"""Sums along the columns of all ranks' scores, and the loss: one message.

    rank 0   [ a a | b | c c c ]   of its rows          [ a a | b | c c c ]   of all rows
    rank 1   [ a a | b | c c c ]   of its rows   --->   [ a a | b | c c c ]   of all rows
    rank 2   [ a a | b | c c c ]   of its rows          [ a a | b | c c c ]   of all rows

Every rank receives every rank's logsumexp of each column, the scores of all pairs, and the terms of
the loss along rows. A message of all columns from all ranks grows with ranks times pairs; if it is
large, each rank reduces its own columns first, which takes a second message.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from allgrad.collectives.all_gather import all_gather, reduce_scatter
from allgrad.losses._pairs.pair_terms import softplus

if TYPE_CHECKING:
    from torch import Tensor

    from allgrad.losses._pairs.key_blocks import KeyLayout

__all__ = ["ColumnSums", "column_sums"]

ONE_MESSAGE_UP_TO = 4 << 20  # bytes that a rank receives


class ColumnSums(NamedTuple):
    """What every rank knows of the columns."""

    lse: Tensor  # of each column of all ranks, pairs included
    own_negatives: Tensor  # the logsumexp of each own column without its pair
    loss: Tensor  # the sum of all terms, along rows and along columns


def column_sums(
    layout: KeyLayout, negatives: Tensor, pairs: Tensor, row_loss: Tensor
) -> ColumnSums:
    """Combine the ranks' ``negatives``: the logsumexp of each column over a rank's rows, without pairs.

    ``pairs`` are the scores of this rank's pairs, ``row_loss`` its terms of the loss along rows.
    """
    own, total = layout.sizes[layout.rank], len(negatives)
    start = layout.start
    if layout.world == 1:
        loss = row_loss + softplus(negatives - pairs).sum()
        return ColumnSums(torch.logaddexp(negatives, pairs), negatives, loss)
    if layout.world * total * negatives.itemsize > ONE_MESSAGE_UP_TO:
        return _in_two_messages(layout, negatives, pairs, row_loss)
    message = torch.cat([negatives, pairs, row_loss.reshape(1)])
    sizes = tuple(total + size + 1 for size in layout.sizes)
    received = all_gather(message, sizes=sizes, group=layout.group, grad="none")
    if layout.is_equal:
        rows = received.view(layout.world, -1)
        parts, all_pairs, losses = rows[:, :total], rows[:, total:-1].reshape(-1), rows[:, -1]
    else:
        pieces = received.split(sizes)
        parts = torch.stack([piece[:total] for piece in pieces])
        all_pairs = torch.cat([piece[total:-1] for piece in pieces])
        losses = torch.stack([piece[-1] for piece in pieces])
    joined = parts.logsumexp(0)
    loss = losses.sum() + softplus(joined - all_pairs).sum()
    lse = torch.logaddexp(joined, all_pairs)
    return ColumnSums(lse, joined[start : start + own], loss)


def _in_two_messages(
    layout: KeyLayout, negatives: Tensor, pairs: Tensor, row_loss: Tensor
) -> ColumnSums:
    sizes, group = layout.sizes, layout.group
    own = reduce_scatter(negatives, op="logsumexp", sizes=sizes, group=group, grad="none")
    loss = row_loss + softplus(own - pairs).sum()
    message = torch.cat([torch.logaddexp(own, pairs), loss.reshape(1)])
    counts = tuple(size + 1 for size in sizes)
    received = all_gather(message, sizes=counts, group=group, grad="none")
    if layout.is_equal:
        rows = received.view(layout.world, -1)
        return ColumnSums(rows[:, :-1].reshape(-1), own, rows[:, -1].sum())
    pieces = received.split(counts)
    lse = torch.cat([piece[:-1] for piece in pieces])
    return ColumnSums(lse, own, torch.stack([piece[-1] for piece in pieces]).sum())
