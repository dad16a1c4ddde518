"""Attention on one rank: whole, or with one block of keys and its log-sum-exp.

Both are differentiable to any order, and keep no matrix of scores for backward.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, is_grad_enabled
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from allgrad._autograd.transforms import is_plain_autograd
from allgrad._core.module_internals import kernel_inputs
from allgrad._core.torch_internals import before_node, current_node

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

__all__ = [
    "attend_all",
    "attend_alone",
    "attend_block",
    "nothing_of",
]


_Options: TypeAlias = tuple[Tensor | None, bool, float | None]  # mask, causal, scale


def attend_all(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Attention by torch's fastest kernel, whose first derivative is the kernel's own.

    The kernels have no second derivative, and none in torch.func: there the plain formula is used.
    """
    if not (q.shape[-2] and k.shape[-2]):
        return q.new_zeros(*q.shape[:-1], v.shape[-1]) + nothing_of(q, k, v)
    options = mask, causal, scale
    if not is_plain_autograd():
        return _by_formula(q, k, v, options)
    if _HIDDEN and _kind(q, v, mask) in _HIDDEN:
        return _in_own_graph(q, k, v, options)
    return _twice_differentiable(_by_kernel(q, k, v, options), q, k, v, options)


def attend_alone(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor:
    """The same for tensors of one shape in plain autograd, with nothing left to check."""
    options = None, causal, scale
    if _HIDDEN and _kind(q, v, None) in _HIDDEN:
        return _in_own_graph(q, k, v, options)
    y = scaled_dot_product_attention(q, k, v, None, 0.0, causal, scale=scale)
    node = y.grad_fn
    if type(node) in _KERNELS:
        before_node(node, y, partial(_before_kernel, (q, k, v), options))
        return y
    return _twice_differentiable(y, q, k, v, options)


# Inputs for which torch puts ops of its own around its kernel, to pad them for example.
_HIDDEN: set[tuple[object, ...]] = set()
_KERNEL = "ScaledDotProduct"
_KERNELS: set[type] = set()  # of nodes that are called so


def _kind(q: Tensor, v: Tensor, mask: Tensor | None) -> tuple[object, ...]:
    return q.device.type, q.dtype, q.shape[-1], v.shape[-1], mask is None


def _twice_differentiable(y: Tensor, q: Tensor, k: Tensor, v: Tensor, options: _Options) -> Tensor:
    """Give torch's kernel a second derivative, where its node is next to the result.

    Where torch took no kernel there is nothing to do. This is all that a call costs beside torch's:
    a hook after the node would take four times as long, so one before it asks for that one.
    """
    node = y.grad_fn
    if node is None:
        return y
    if node.name().startswith(_KERNEL):
        _KERNELS.add(type(node))
        before_node(node, y, partial(_before_kernel, (q, k, v), options))
        return y
    if not _leads_to_kernel(node, steps=4):
        return y
    _HIDDEN.add(_kind(q, v, options[0]))
    return _in_own_graph(q, k, v, options)


def _before_kernel(inputs: Sequence[Tensor], options: _Options, _: Tensor) -> None:
    """Have the gradients that a kernel's node is about to compute replaced by those of the formula."""
    if not is_grad_enabled():
        return
    node = current_node()
    edges = node.next_functions
    if not all(_is_edge_of(x, edge) for x, (edge, _) in zip(inputs, edges, strict=False)):
        inputs = kernel_inputs(node)  # as autocast made them of what the caller gave

    def by_formula(found: tuple[Any, ...], gradients: tuple[Any, ...]) -> tuple[Any, ...] | None:
        handle.remove()  # a retained graph may run again
        if gradients[0] is None:
            return None
        # Torch takes none where it computed none, because nobody asked for it.
        exact = _gradients_by_formula(inputs, options, gradients[0])
        kept = (None if old is None else new for old, new in zip(found, exact, strict=False))
        return *kept, *found[3:]

    handle = node.register_hook(by_formula)


def _is_edge_of(x: Tensor, edge: Any) -> bool:
    if edge is None or not x.requires_grad:
        return edge is None and not x.requires_grad
    return edge is x.grad_fn if x.grad_fn is not None else getattr(edge, "variable", None) is x


def _leads_to_kernel(node: Any, steps: int) -> bool:
    if node is None or not steps:
        return False
    if node.name().startswith(_KERNEL):
        return True
    return any(_leads_to_kernel(edge, steps - 1) for edge, _ in node.next_functions)


def _by_kernel(q: Tensor, k: Tensor, v: Tensor, options: _Options) -> Tensor:
    mask, causal, scale = options
    grouped = q.dim() > 2 and q.shape[-3] != k.shape[-3]
    return scaled_dot_product_attention(
        q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )


def _by_formula(q: Tensor, k: Tensor, v: Tensor, options: _Options) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return _by_kernel(q, k, v, options)


def nothing_of(*xs: Tensor) -> Tensor:
    """Zero, linked to the tensors: a rank that needs none of them takes part in their backward.

    Its derivatives of any order depend on the tensors, as those of attention do: every rank comes to them
    again (test_second_derivative_of_a_linear_loss). And it saves a factor: a checkpoint computes its part
    again once backward comes to something that was saved, and must come to it before any call, on every rank.
    """
    nothing = torch.stack([x.flatten()[:0].sum() for x in xs]).sum()
    return nothing * nothing.exp()


def _in_own_graph(q: Tensor, k: Tensor, v: Tensor, options: _Options) -> Tensor:
    result: Tensor = _Kernel.apply(options, q, k, v)  # type: ignore[no-untyped-call]
    return result


class _Kernel(torch.autograd.Function):
    """The kernel with a graph of its own, which backward runs unless it must be differentiated.

    Where it must be, the plain formula stands in: kernels have no second derivative.
    """

    @staticmethod
    def forward(ctx: Any, options: _Options, *inputs: Tensor) -> Tensor:
        ctx.options, ctx.inner = options, _inner_graph(inputs, options)
        ctx.save_for_backward(*inputs)
        result: Tensor = ctx.inner[0]
        return result.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        if torch.is_grad_enabled():
            return None, *_gradients_by_formula(inputs, ctx.options, gradient)
        # Kept, the inner graph would outlive the rest of the graph: a second backward makes it anew.
        inner, ctx.inner = ctx.inner, None
        y, leaves = inner or _inner_graph(inputs, ctx.options)
        return None, *_gradients(y, leaves, gradient, graph=False)


def _inner_graph(inputs: Sequence[Tensor], options: _Options) -> tuple[Tensor, list[Tensor]]:
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
        return _by_kernel(leaves[0], leaves[1], leaves[2], options), leaves


def _gradients_by_formula(
    inputs: Sequence[Tensor], options: _Options, gradient: Tensor
) -> list[Tensor | None]:
    """Gradients that can be differentiated in turn."""
    # Keys may be made of queries, or be the same tensor: a gradient of one must not hold the other's.
    q, k, v = (x.view_as(x) for x in inputs)
    return _gradients(_by_formula(q, k, v, options), (q, k, v), gradient, graph=True)


def _gradients(
    y: Tensor, xs: Sequence[Tensor], gradient: Tensor, *, graph: bool
) -> list[Tensor | None]:
    wanted = [x for x in xs if x.requires_grad]
    found = iter(torch.autograd.grad(y, wanted, gradient, create_graph=graph))
    return [next(found) if x.requires_grad else None for x in xs]


def attend_block(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention with one block of keys, and the log-sum-exp of each query's scores.

    ``mask`` is True where a query sees a key. At least one key is seen by each query.
    """
    with _no_autocast(q):
        if is_plain_autograd():
            out, lse = _Block.apply(q, k, v, scale, mask)  # type: ignore[no-untyped-call]
            return out, lse
        scores = _scores(q, k, scale, mask)
        lse = scores.logsumexp(-1)
        return (scores - lse.unsqueeze(-1)).exp() @ v.to(scores.dtype), lse


def _no_autocast(x: Tensor) -> AbstractContextManager[object]:
    device = x.device.type
    if torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


class _Block(torch.autograd.Function):
    """Backward computes the scores again. It is made of torch ops on what was saved, inputs and
    outputs, so autograd differentiates it in turn.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        q, k, v, scale, mask = args
        scores = _scores(q, k, scale, mask)
        lse = scores.logsumexp(-1)
        out = scores.sub_(lse.unsqueeze(-1)).exp_() @ v.to(scores.dtype)
        ctx.scale, ctx.mask = scale, mask
        ctx.save_for_backward(q, k, v, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        with _no_autocast(q):
            weights = (_scores(q, k, ctx.scale, ctx.mask) - lse.unsqueeze(-1)).exp()
            d_v = weights.mT @ d_out
            along = d_lse - (d_out * out).sum(-1)
            d_scores = weights * (d_out @ v.to(out.dtype).mT + along.unsqueeze(-1)) * ctx.scale
            d_q = (d_scores @ k.to(out.dtype)).to(q.dtype)
            d_k = (d_scores.mT @ q.to(out.dtype)).to(k.dtype)
            return d_q, d_k, d_v.to(v.dtype), None, None


def _scores(q: Tensor, k: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q @ k.mT).to(wide) * scale
    return scores if mask is None else scores.masked_fill(~mask, -torch.inf)
