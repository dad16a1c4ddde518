"""Attention over a sequence split among ranks: keys and values gathered."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from allgrad.collectives.all_gather import all_gather
from allgrad.nn._attention import attend_all
from allgrad.nn._attention_inputs import check_heads
from allgrad.nn._ranks import find_place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from allgrad.types import GroupLike

__all__ = ["gathered_attention"]


def gathered_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    sizes: Sequence[int] | None = None,
    group: GroupLike = None,
) -> Tensor:
    """Attend to the keys of all ranks, gathered on each.

        rank 0   q [ a a ]     k, v [ a a ]           [ a a ] of k, v [ a a b c c c ]
        rank 1   q [ b ]       k, v [ b ]      --->   [ b ]   of k, v [ a a b c c c ]
        rank 2   q [ c c c ]   k, v [ c c c ]         [ c c c ] of k, v [ a a b c c c ]

    The twin of ``scaled_dot_product_attention`` on the joined sequence, of which each rank holds a
    piece of any length along dim -2, and gets its queries' outputs. Tensors are (..., heads,
    length, width); k and v may have fewer heads, each for a group of q's. With ``causal`` a query
    sees the keys up to its own place in the joined sequence.

    Gradient: exact to any order. Each rank uses the keys for its own queries, hence ``grad="sum"``:
    a key's gradient is the sum over ranks. The first derivative is that of torch's kernel.

    ``sizes`` are the keys of each rank.

    Cost: one collective of keys and values each way, plus one size exchange unless ``sizes`` is
    given. Memory for the keys and values of all ranks. ``ring_attention`` needs less of it.
    """
    sizes = check_heads("gathered_attention", q, k, v, causal=causal, sizes=sizes, group=group)
    if len(sizes) > 1:
        k, v = all_gather((k, v), -2, sizes=sizes, group=group)
    if not causal or not sum(sizes):
        return attend_all(q, k, v, scale=scale)
    rank = find_place("gathered_attention", group).rank
    first, length = sum(sizes[:rank]), sizes[rank]
    if not first:  # all of the keys stay, so that this rank takes part in backward
        k, v = k.narrow(-2, 0, length), v.narrow(-2, 0, length)
        return attend_all(q, k, v, causal=True, scale=scale)
    last = first + length
    mask = torch.ones(length, last, dtype=torch.bool, device=q.device).tril(first)
    return attend_all(q, k.narrow(-2, 0, last), v.narrow(-2, 0, last), mask=mask, scale=scale)
