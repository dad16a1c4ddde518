"""Queries, keys and values of all ranks: whether they fit, and in which dtype torch attends to them."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch

from allgrad.errors import InputError, PieceMismatch, SizesError, rank_table
from allgrad.nn._ranks import find_place, gather_numbers, refuse, require_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from allgrad.types import GroupLike

__all__ = ["cast_by_autocast", "check_heads"]


def cast_by_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What autocast makes of the inputs of torch's attention."""
    return q.to(_dtype_of(q)), k.to(_dtype_of(k)), v.to(_dtype_of(v))


def _dtype_of(x: Tensor) -> torch.dtype:
    """In which torch's attention computes with it."""
    device, dtype = x.device.type, x.dtype
    cast = x.is_floating_point() and dtype != torch.float64
    return torch.get_autocast_dtype(device) if cast and torch.is_autocast_enabled(device) else dtype


_DTYPES = torch.float16, torch.bfloat16, torch.float32, torch.float64


class _Shape(NamedTuple):
    """What one rank tells of its queries, keys and values."""

    q_heads: int
    q_length: int
    q_width: int
    k_heads: int
    k_length: int
    k_width: int
    v_heads: int
    v_length: int
    v_width: int
    dims: int
    batch: int
    dtype: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor) -> _Shape:
        sides = [(1, 1, 1, *x.shape)[-3:] for x in (q, k, v)]
        dims = q.dim() if q.dim() == k.dim() == v.dim() and q.dim() >= 2 else 0
        dtypes = {_dtype_of(x) for x in (q, k, v)}
        dtype = _DTYPES.index(dtypes.pop()) if len(dtypes) == 1 and dtypes <= {*_DTYPES} else -1
        return cls._make([*sides[0], *sides[1], *sides[2], dims, prod(list(k.shape[:-3])), dtype])

    def __str__(self) -> str:
        return (
            f"q {self.q_heads} x {self.q_length} x {self.q_width}, "
            f"k {self.k_heads} x {self.k_length} x {self.k_width}, "
            f"v {self.v_heads} x {self.v_length} x {self.v_width}, batch of {self.batch}, "
            f"{'several dtypes' if self.dtype < 0 else str(_DTYPES[self.dtype]).removeprefix('torch.')}"
        )

    def problem(self, causal: bool) -> str | None:
        if not self.dims:
            return "not of one number of dimensions, 2 or more"
        if self.k_heads != self.v_heads or not self.k_heads or self.q_heads % self.k_heads:
            return f"{self.q_heads} heads of q do not divide by {self.k_heads} of k, {self.v_heads} of v"
        if self.k_length != self.v_length:
            return "k and v differ in length"
        if self.q_width != self.k_width:
            return "q and k differ in width"
        if causal and self.q_length != self.k_length:
            return "causal, but q and k differ in length"
        if self.dtype < 0:
            return "not of one floating-point dtype"
        return None


# Shapes of calls in a world of one that were found to fit.
_FIT: set[tuple[object, ...]] = set()
_MOST = 1024


def check_heads(
    call: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    sizes: Sequence[int] | None,
    group: GroupLike,
) -> tuple[int, ...]:
    """Check the shapes, and give the number of keys on each rank.

    Without ``sizes`` the ranks tell each other their shapes, and one rank's mistake raises on all.
    """
    place = find_place(call, group)
    alone = place.world == 1 and sizes is None
    try:
        shapes = q.shape, k.shape, v.shape, *map(_dtype_of, (q, k, v)), causal
    except AttributeError:
        require_tensors(call, group, q=q, k=k, v=v)
        raise
    if alone and not torch.compiler.is_compiling() and shapes in _FIT:
        return (k.shape[-2],)
    own = _Shape.of(q, k, v)
    if alone and own.problem(causal) is None:
        if not torch.compiler.is_compiling():
            if len(_FIT) >= _MOST:
                _FIT.clear()
            _FIT.add(shapes)
        return (own.k_length,)
    by_rank = [own]
    if sizes is None:
        by_rank = [_Shape._make(row) for row in gather_numbers(call, own, q, group)]
    elif len(sizes) != place.world or sizes[place.rank] != own.k_length:
        problem = SizesError(
            f"{call}: sizes={list(sizes)} do not fit rank {place.rank} of {place.world}, which holds "
            f"{own.k_length} keys.\nGive how many keys each rank holds, in rank order."
        )
        refuse(call, group, problem)
    problems = [one.problem(causal) for one in by_rank]
    marks = {rank: p for rank, p in enumerate(problems) if p is not None}
    rows = [str(one) for one in by_rank] if sizes is None else [str(own)] * place.world
    if marks:
        marks = marks if sizes is None else {place.rank: marks[0]}
        wrong = InputError(
            rank_table(
                f"{call}: q, k and v are (..., heads, length, width), and k's heads divide q's.",
                rows,
                marks,
                "Give as many heads of k as of v, a divisor of q's, one width of q and k, and one dtype.",
            )
        )
        if sizes is None:  # every rank has seen it
            raise wrong
        refuse(call, group, wrong)
    if sizes is not None:
        return tuple(sizes)
    kinds = [(one.q_heads, one.q_width, one.k_heads, one.v_width, *one[-3:]) for one in by_rank]
    usual = max(kinds, key=kinds.count)
    odd = {rank: "differs" for rank, kind in enumerate(kinds) if kind != usual}
    if odd:
        raise PieceMismatch(
            rank_table(
                f"{call}: pieces may differ in length only.",
                rows,
                odd,
                "Give every rank the same heads, widths, batch and dtype.",
            )
        )
    return tuple(one.k_length for one in by_rank)
