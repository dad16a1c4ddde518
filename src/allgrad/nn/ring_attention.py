"""Attention over a sequence split among ranks: keys and values passed around a ring."""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING, Any

import torch

from allgrad._autograd.transforms import is_plain_autograd
from allgrad._wire.groups import is_alone
from allgrad.collectives.permute import shift
from allgrad.nn._attention import attend_all, attend_alone, attend_block, nothing_of
from allgrad.nn._attention_inputs import cast_by_autocast, check_heads
from allgrad.nn._ranks import find_place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from allgrad.types import GroupLike

__all__ = ["ring_attention"]

_NAME = "ring_attention"


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    sizes: Sequence[int] | None = None,
    group: GroupLike = None,
) -> Tensor:
    """Attend to the keys of all ranks, which are passed from rank to rank.

                 queries       keys in turn
        rank 0   q [ a a ]     [ a a ]     [ c c c ]   [ b ]               [ a a ]
        rank 1   q [ b ]       [ b ]       [ a a ]     [ c c c ]   --->    [ b ]
        rank 2   q [ c c c ]   [ c c c ]   [ b ]       [ a a ]             [ c c c ]

    The same result as ``gathered_attention``, with memory for two blocks of keys: the next block
    travels while this one is attended to. The outputs are merged by the log-sum-exps of their
    scores. No scores are kept; backward computes them again.

    Gradient: exact to any order. The gradients of a block travel around the ring the other way,
    and each rank adds its part: ``shift`` has no ``grad=`` to choose.

    ``sizes`` are the keys of each rank. With ``causal`` the first ranks have less to do than the
    last ones; blocks that no query of a rank sees are passed on only.

    Cost: for W ranks, W - 1 messages of a block of keys and values each way, plus one size
    exchange unless ``sizes`` is given. In a world of one: torch's attention.
    """
    if sizes is None and is_plain_autograd() and is_alone(_NAME, group):
        try:
            shape = q.shape
            fit = shape == k.shape == v.shape and len(shape) > 2 and 0 not in shape
        except AttributeError:
            fit = False  # not a tensor, as check_heads will say
        if fit:
            return attend_alone(q, k, v, causal, scale)
    sizes = check_heads(_NAME, q, k, v, causal=causal, sizes=sizes, group=group)
    if len(sizes) == 1:
        return attend_all(q, k, v, causal=causal, scale=scale)
    q, k, v = cast_by_autocast(q, k, v)
    world, rank = len(sizes), find_place(_NAME, group).rank
    length, scale = q.shape[-2], 1 / sqrt(q.shape[-1]) if scale is None else scale
    heads = k.shape[-3] if k.dim() > 2 else 1
    grouped = (q.shape[-3] if q.dim() > 2 else 1) // heads
    rows = _heads_to_rows(q, (heads, grouped)) if grouped > 1 else q
    mask = None
    if causal:
        mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
        mask = mask.repeat(grouped, 1)
    merged: tuple[Tensor, Tensor] | None = None
    for step in range(world):
        source = (rank - step) % world
        if step + 1 < world:
            held = [sizes[(r - step) % world] for r in range(world)]
            coming: Any = shift((k, v), dim=-2, sizes=held, group=group, async_op=True)
        if sizes[source] and length and not (causal and source > rank):
            own = mask if source == rank else None
            merged = _merge(merged, attend_block(rows, k, v, scale=scale, mask=own))
        if step + 1 < world:
            k, v = coming.wait()
    out = q.new_zeros(*rows.shape[:-1], v.shape[-1]) if merged is None else merged[0].to(q.dtype)
    # A rank that does not see the last block takes part in its backward all the same.
    out = out + nothing_of(q, k, v)
    return out if grouped == 1 else _rows_to_heads(out, (grouped, length))


def _merge(
    one: tuple[Tensor, Tensor] | None, other: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Outputs and log-sum-exps of two blocks of keys become those of both."""
    if one is None:
        return other
    both = torch.logaddexp(one[1], other[1])
    weights = [(part[1] - both).exp().unsqueeze(-1) for part in (one, other)]
    return one[0] * weights[0] + other[0] * weights[1], both


def _heads_to_rows(q: Tensor, heads: tuple[int, int]) -> Tensor:
    """The queries of all heads that share a head of keys, one after another."""
    rows: Tensor = q.unflatten(-3, heads)
    return rows.flatten(-3, -2)


def _rows_to_heads(out: Tensor, rows: tuple[int, int]) -> Tensor:
    heads: Tensor = out.unflatten(-2, rows)
    return heads.flatten(-4, -3)
