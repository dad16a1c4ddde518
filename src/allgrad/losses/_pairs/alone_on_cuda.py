"""One rank alone with an everyday batch on a CUDA device: from the call to the kernels in few steps.

Up to some thousand pairs a step takes as long as the host needs to launch it. So a call with plain,
valid arguments skips the checks. Any other call, also a wrong one, takes the checked path (global_loss),
which gives the same results.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from allgrad._autograd.transforms import is_plain_autograd
from allgrad._core.torch_internals import dispatch_modes, functorch_active
from allgrad._wire.groups import find_group
from allgrad.losses._computed_on import computed_on
from allgrad.losses._pairs.config import LossConfig
from allgrad.losses._pairs.first_order import Inputs, Kept, one_rank_kernels
from allgrad.losses._pairs.fused_pass import kept_scores
from allgrad.losses._pairs.key_blocks import KeyLayout
from allgrad.losses._pairs.modes import Forward, differentiable_gradients, refuse_batches
from allgrad.losses._tiles.torch import TRITON_DTYPES, has_triton

if TYPE_CHECKING:
    from collections.abc import Mapping

    from allgrad.losses._kind import LossKind
    from allgrad.losses._tiles.one_rank import Products
    from allgrad.types import GroupLike, Sizes

__all__ = ["loss_of_one_rank"]

_PLAIN = frozenset({Tensor, torch.nn.Parameter})
_NUMBERS = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})


@cache
def _replay() -> Any:
    """Imported when it is needed: Triton takes a while."""
    from allgrad.losses._tiles import replay

    return replay


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
    values: Any = features.values()
    numbers: Any = scalars.values()
    q, k, *extra = values
    scale, *others = numbers
    bias = others[0] if others else None
    if not (
        type(q) in _PLAIN
        and q.is_cuda
        and type(k) in _PLAIN
        and type(scale) in _PLAIN
        and (bias is None or type(bias) in _PLAIN)
        and (not extra or extra[0] is None)
        and (sizes is None or (isinstance(sizes, str) and sizes == "equal"))
        and (grad_reduction == "mean" or grad_reduction == "sum")  # noqa: PLR1714  may be anything
    ):
        return None
    shape, dtype, device = q.shape, q.dtype, q.device
    if not (
        dtype in TRITON_DTYPES
        and len(shape) == 2
        and k.dtype is dtype
        and k.shape == shape
        and k.device == device
        and 0 < shape[0] ** 2 <= kept_scores(q, alone=True)
        and shape[1]
        and _is_number(scale, device)
        and (bias is None or _is_number(bias, device))
        and torch.is_grad_enabled()
        and (
            q.requires_grad
            or k.requires_grad
            or scale.requires_grad
            or (bias is not None and bias.requires_grad)
        )
        and is_plain_autograd()
        and find_group(name, group).size == 1
        and device.index == torch.cuda.current_device()
        and has_triton()
    ):
        return None
    scale = _scalar(scale)
    bias = None if bias is None else _scalar(bias)
    call = name, group, kind
    if not torch.is_autocast_enabled("cuda"):
        return _apply(call, q, k, scale, bias)  # type: ignore[no-any-return]
    return computed_on(device, _apply, call, q, k, scale, bias)  # type: ignore[no-any-return]


def _is_number(x: Any, device: torch.device) -> bool:
    return x.dtype in _NUMBERS and x.device == device and (not x.dim() or x.numel() == 1)


def _scalar(x: Tensor) -> Tensor:
    """In float32 and without dimensions; a model in 16 bits has a scale in 16 bits."""
    return x.reshape(()).float() if x.dim() or x.dtype is not torch.float32 else x


class _LossOfOneRank(torch.autograd.Function):
    """Keeps the products for one backward. One more, of a retained graph, computes them again."""

    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any,
        call: tuple[str, GroupLike, LossKind],
        q: Tensor,
        k: Tensor,
        scale: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.call = call
        # In every case the same tensors: a checkpoint compares what its two forwards save.
        ctx.save_for_backward(q, k, scale, bias)
        _, needs_query, needs_key, *_ = ctx.needs_input_grad
        found = None
        # Modes such as selective checkpointing see ops, of which a replay has none.
        if not dispatch_modes():
            found = _replay().replayed(call[2], q, k, scale, bias, (needs_query, needs_key))
        if found is None:
            found = _launched(ctx, q, k, scale, bias)
        loss, ctx.kept = found
        return loss

    @staticmethod
    def backward(ctx: Any, by_loss: Tensor) -> tuple[Tensor | None, ...]:
        refuse_batches(ctx.call[0], by_loss)
        kept, ctx.kept = ctx.kept, None
        lease = kept if isinstance(kept, _replay().Lease) else None
        # create_graph=True, or torch.vmap of backward
        in_modes = torch.is_grad_enabled() or functorch_active()
        if lease is not None and not in_modes:
            return None, *lease.gradients(by_loss)
        q, k, scale, bias = ctx.saved_tensors
        products = kept if lease is None else lease.products()
        if products is None:
            _, products = computed_on(q.device, _launched, ctx, q, k, scale, bias)
        if in_modes:
            forward = Forward(Kept(products=products), ctx.needs_input_grad[1:])
            x = Inputs(q, k, scale, bias)
            found = differentiable_gradients(_config(ctx, q, k), forward, x, by_loss)
        else:
            found = one_rank_kernels().gradients(ctx.call[2], q, k, scale, bias, by_loss, products)
        if lease is not None:
            lease.release()
        return None, *found


def _launched(
    ctx: Any, q: Tensor, k: Tensor, scale: Tensor, bias: Tensor | None
) -> tuple[Tensor, Products]:
    _, needs_query, needs_key, *_ = ctx.needs_input_grad
    with torch.no_grad():
        found: tuple[Tensor, Products] = one_rank_kernels().loss_and_products(
            ctx.call[2],
            q,
            k,
            scale,
            bias,
            smoothing=0.0,
            needs_query_grad=needs_query,
            needs_key_grad=needs_key,
        )
    return found


# The same as _LossOfOneRank.apply outside of torch.func, less what that one does in Python.
_apply: Any = super(torch.autograd.Function, _LossOfOneRank).apply


def _config(ctx: Any, q: Tensor, k: Tensor) -> LossConfig:
    name, group, kind = ctx.call
    layout = KeyLayout(0, (len(k),), group)
    return LossConfig(name, kind, layout, (len(q),), needs_key_grad=ctx.needs_input_grad[2])
