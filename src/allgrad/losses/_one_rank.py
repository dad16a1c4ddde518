"""One rank alone with an everyday batch on a CUDA device: from the call to the kernels in few steps.

Up to some thousand pairs a step takes as long as the host needs to launch it. So such a call is
recognised by what it is given, and checked no further; every other call, a wrong one among them, goes
the long way (_arguments), which gives the same results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from allgrad._autograd.transforms import is_plain_autograd
from allgrad._wire import primitives as wire
from allgrad.losses._config import LossConfig
from allgrad.losses._first_order import Inputs, Kept
from allgrad.losses._fused_pass import has_fused_kernels
from allgrad.losses._key_blocks import KeyLayout
from allgrad.losses._modes import first_order, outside_autocast
from allgrad.losses._tiles.torch import KEPT_SCORES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from allgrad.losses._kind import LossKind
    from allgrad.losses._tiles.one_rank import Products
    from allgrad.types import GroupLike, Sizes

__all__ = ["loss_of_one_rank"]

_PLAIN = frozenset({Tensor, torch.nn.Parameter})
_REDUCTIONS = frozenset({"mean", "sum"})


def loss_of_one_rank(
    name: str,
    kind: LossKind,
    features: Mapping[str, Tensor | None],
    scalars: Mapping[str, Tensor | float | None],
    *,
    grad_reduction: str,
    sizes: Sizes,
    group: GroupLike,
) -> Tensor | None:
    """The loss without label smoothing, or None if the call is not of the plain kind."""
    q, k, *extra = features.values()
    scale, *others = scalars.values()
    bias = others[0] if others else None
    if not (
        type(q) in _PLAIN
        and type(k) in _PLAIN
        and _is_number(scale)
        and (bias is None or _is_number(bias))
        and (not extra or extra[0] is None)
        and (sizes is None or (isinstance(sizes, str) and sizes == "equal"))
        and grad_reduction in _REDUCTIONS
    ):
        return None
    assert isinstance(q, Tensor)
    assert isinstance(k, Tensor)
    assert isinstance(scale, Tensor)
    shape, device = q.shape, q.device
    if not (
        has_fused_kernels(q)
        and k.dtype == q.dtype
        and len(shape) == 2
        and k.shape == shape
        and 0 < shape[0] ** 2 <= KEPT_SCORES["cuda"]
        and shape[1] > 0
        and k.device == device == scale.device
        and (bias is None or bias.device == device)  # type: ignore[union-attr]
        and device.index == torch.cuda.current_device()
        and torch.is_grad_enabled()
        and is_plain_autograd()
        and wire.resolve(name, group).size == 1
    ):
        return None
    needs_key_grad = k.requires_grad
    if not (q.requires_grad or needs_key_grad or scale.requires_grad) and (
        bias is None or not bias.requires_grad  # type: ignore[union-attr]
    ):
        return None
    call = name, group
    loss: Tensor = outside_autocast(_apply, call, kind, q, k, scale, bias, device="cuda")
    return loss


def _is_number(x: object) -> bool:
    return type(x) in _PLAIN and x.dtype is torch.float32 and x.dim() == 0  # type: ignore[attr-defined]


class _LossOfOneRank(torch.autograd.Function):
    """Keeps the products for one backward. One more, of a retained graph, computes them again."""

    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any,
        call: tuple[str, GroupLike],
        kind: LossKind,
        q: Tensor,
        k: Tensor,
        scale: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        from allgrad.losses._tiles.replay import replayed

        ctx.call, ctx.kind = call, kind
        # In every case the same tensors: a checkpoint compares what its two forwards save.
        ctx.save_for_backward(q, k, scale, bias)
        found = replayed(kind, q, k, scale, bias, ctx.needs_input_grad[2:4])
        if found is None:
            loss, ctx.kept = _launched(ctx, q, k, scale, bias)
        else:
            loss, ctx.kept = found
        return loss

    @staticmethod
    def backward(ctx: Any, by_loss: Tensor) -> tuple[Tensor | None, ...]:
        from allgrad.losses._tiles import one_rank
        from allgrad.losses._tiles.replay import Lease

        q, k, scale, bias = ctx.saved_tensors
        kept, ctx.kept = ctx.kept, None
        lease = kept if isinstance(kept, Lease) else None
        products = kept if lease is None else lease.products()
        if products is None:
            _, products = outside_autocast(_launched, ctx, q, k, scale, bias, device="cuda")
        if torch.is_grad_enabled():  # create_graph=True
            needed = ctx.needs_input_grad[2:]
            x = Inputs(q, k, scale, bias)
            found = first_order(_config(ctx, q, k), (Kept(products=products), needed), x, by_loss)
        else:
            found = one_rank.gradients(ctx.kind, q, k, scale, bias, by_loss, products)
        if lease is not None:
            lease.release()
        return None, None, *found


def _launched(
    ctx: Any, q: Tensor, k: Tensor, scale: Tensor, bias: Tensor | None
) -> tuple[Tensor, Products]:
    from allgrad.losses._tiles import one_rank

    with torch.no_grad():
        return one_rank.loss_and_products(
            ctx.kind,
            q,
            k,
            scale,
            bias,
            smoothing=0.0,
            needs_query_grad=ctx.needs_input_grad[2],
            needs_key_grad=ctx.needs_input_grad[3],
        )


# The same as _LossOfOneRank.apply outside of torch.func, less what that one does in Python.
_apply: Any = super(torch.autograd.Function, _LossOfOneRank).apply


def _config(ctx: Any, q: Tensor, k: Tensor) -> LossConfig:
    name, group = ctx.call
    layout = KeyLayout(0, (len(k),), group)
    return LossConfig(name, ctx.kind, layout, (len(q),), needs_key_grad=ctx.needs_input_grad[3])
