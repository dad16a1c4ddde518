"""Values less the mean of all ranks, over their standard deviation, times weight, plus bias."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from allgrad._autograd.transforms import is_plain_autograd
from allgrad._core.torch_internals import never_traced
from allgrad.nn._moments import Moments, RankMoments, by_channel, by_given_moments, once

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["normalise"]


def normalise(
    found: RankMoments, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Moments]:
    """Normalise this rank's values; also gives the moments of all, which have no gradient."""
    if is_plain_autograd() and found.centred.numel():  # torch's kernels divide by that
        y, *joined = _Normalise.apply(*found, weight, bias, eps)  # type: ignore[no-untyped-call]
        return y, Moments(*joined)
    moments = found.join()
    y = _by_formula(found, moments, weight, bias, eps)
    return y, Moments(*(x.detach() for x in moments))


def _by_formula(
    found: RankMoments, joined: Moments, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    scale = (joined.variance() + eps).rsqrt()
    if weight is not None:
        scale = scale * weight
    offset = (found.centre - joined.mean) * scale
    if bias is not None:
        offset = offset + bias
    x = found.centred
    return x * by_channel(scale, x) + by_channel(offset, x)


@never_traced
class _Normalise(torch.autograd.Function):
    """The same by torch's kernel for given moments, each way: one pass over memory.

    Gradients that are differentiated in turn are those of the formula.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        centred, centre, rows, weight, bias, ctx.eps = args
        joined, beyond = RankMoments(centred, centre, rows).join_beyond()
        beside, variance = joined.mean - centre, joined.variance()
        given = centred, rows, weight, bias, centre
        ctx.save_for_backward(*given, beyond, beside, variance, joined.number)
        ctx.mark_non_differentiable(*joined)
        ctx.set_materialize_grads(False)
        factor, term = _cast(weight, beside.dtype), _cast(bias, beside.dtype)
        return by_given_moments(centred, (beside, variance), factor, term, ctx.eps), *joined

    @staticmethod
    def backward(ctx: Any, by_y: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if by_y is None:
            return (None,) * 6
        found = _gradients if once(by_y) else _gradients_by_formula
        by_centred, *others = found(ctx.saved_tensors, ctx.eps, by_y)
        return by_centred, None, *others, None


def _cast(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if x is None else x.to(dtype)


def _gradients(saved: tuple[Any, ...], eps: float, by_y: Tensor) -> tuple[Tensor | None, ...]:
    x, rows, weight, bias, _, beyond, beside, variance, number = saved
    if by_y.stride() != x.stride():  # by an expanded gradient, for one, the kernel takes far longer
        by_y = torch.empty_like(x).copy_(by_y)
    factor = torch.ones_like(beside) if weight is None else weight.to(beside.dtype)
    by_x, by_weight, by_bias = torch.ops.aten.native_batch_norm_backward(
        by_y, x, factor, beside, variance, None, None, False, eps, [True, True, True]
    )
    narrow = (variance + eps).rsqrt_()
    share = factor * narrow / -number  # at least 1: this rank has values
    # A rank's mean moves the mean of all, and its own distance from that: twice half the squares.
    by_squares = by_weight * share * narrow
    by_means = torch.addcmul(by_bias * share * rows[:, -1:], beyond, by_squares)
    halves, nothing = (by_squares / 2).expand_as(beyond), beyond.new_zeros(len(beyond), 1)
    by_rows = torch.cat([by_means, halves, nothing], 1)
    return (
        by_x,
        by_rows,
        None if weight is None else by_weight.to(weight.dtype),
        None if bias is None else by_bias.to(bias.dtype),
    )


def _gradients_by_formula(
    saved: tuple[Any, ...], eps: float, by_y: Tensor
) -> tuple[Tensor | None, ...]:
    graph, centre = torch.is_grad_enabled(), saved[4]
    with torch.enable_grad():
        inputs: list[Any] = [None if x is None else _followed(x) for x in saved[:4]]
        found = RankMoments(inputs[0], centre, inputs[1])
        y = _by_formula(found, found.join(), inputs[2], inputs[3], eps)
        wanted = [x for x in inputs if x is not None]
        got = iter(torch.autograd.grad(y, wanted, by_y, create_graph=graph, materialize_grads=True))
    return tuple(None if x is None else next(got) for x in inputs)


def _followed(x: Tensor) -> Tensor:
    return x.view_as(x) if x.requires_grad else x.detach().requires_grad_()
