"""Mean and variance of each channel over the values of all ranks, in one message."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from allgrad._autograd.transforms import is_plain_autograd
from allgrad._core.torch_internals import is_batched_gradient, never_traced
from allgrad.collectives.all_gather import all_gather

if TYPE_CHECKING:
    from torch import Tensor

    from allgrad.types import GroupLike

__all__ = ["Moments", "RankMoments", "by_channel", "by_given_moments", "gather_moments", "once"]


class Moments(NamedTuple):
    """The moments of all ranks' values."""

    mean: Tensor  # of each channel
    squares: Tensor  # the sum of (x - mean)^2
    number: Tensor  # of values

    def variance(self) -> Tensor:
        return self.squares / self.number.clamp(min=1)


class RankMoments(NamedTuple):
    """A rank's own values less ``centre``, and every rank's mean, sum of squares and count."""

    centred: Tensor
    centre: Tensor
    rows: Tensor

    def join(self) -> Moments:
        """The moments of all ranks' values."""
        return self.join_beyond()[0]

    def join_beyond(self) -> tuple[Moments, Tensor]:
        """The same by the formula of Chan, Golub and LeVeque: no large numbers cancel.

        Also gives each rank's count times how far its mean is from the mean of all.
        """
        channels = self.centre.numel()
        means, squares, counts = self.rows.split_with_sizes((channels, channels, 1), 1)
        counts = counts.detach()
        number = counts.sum()
        # Not as matrix products: autocast would round them.
        mean = (means * counts).sum(0) / number.clamp(min=1)
        apart = means - mean
        beyond = apart * counts
        return Moments(mean, torch.addcmul(squares, beyond, apart).sum(0), number), beyond


def gather_moments(x: Tensor, group: GroupLike) -> RankMoments:
    """Reduce samples (N, C, ...) to C channels, and exchange what they came to.

    The values are used on every rank in its own way, so the gather has ``grad="sum"``.

    ``centre`` is a constant: sums of x - centre determine the moments for any constant, so the
    derivatives of every order are exact, and backward has one pass less.
    """
    if x.dtype in {torch.float16, torch.bfloat16}:
        x = x.float()
    fixed, dims = x.detach(), _reduced(x)
    centre = fixed.mean(dims) if x.numel() else fixed.sum(dims)
    centred = x - by_channel(centre, x)
    if is_plain_autograd():
        row: Tensor = _Row.apply(centred, centre)  # type: ignore[no-untyped-call]
    else:
        row, _ = _row(centred, centre)
    return RankMoments(centred, centre, all_gather(row, sizes="equal", group=group))


def by_channel(values: Tensor, x: Tensor) -> Tensor:
    """A value of each channel, in a shape that meets (N, C, ...)."""
    return values.view(-1, *[1] * (x.dim() - 2))


def once(gradient: Tensor) -> bool:
    """Tell whether backward has one gradient to compute, which nobody differentiates in turn."""
    plain = is_plain_autograd() and not torch.is_grad_enabled()
    return plain and not is_batched_gradient(gradient)


def _reduced(x: Tensor) -> list[int]:
    return [d for d in range(x.dim()) if d != 1]


def _count(x: Tensor) -> int:
    return x.numel() // x.shape[1] if x.shape[1] else 0


def _row(centred: Tensor, centre: Tensor) -> tuple[Tensor, Tensor]:
    """What this rank tells, and the mean of the centred values: what the centre was rounded by."""
    n, dims = _count(centred), _reduced(centred)
    total = centred.sum(dims)
    beside = total / max(n, 1)
    squares = torch.addcmul(centred.square().sum(dims), total, beside, value=-1)
    told = centre + beside, squares, centre.new_full((1,), n)
    return torch.cat(told).unsqueeze(0), beside


@never_traced
class _Row(torch.autograd.Function):
    """The row of this rank, whose gradient is one pass where autograd would take four."""

    @staticmethod
    def forward(ctx: Any, centred: Tensor, centre: Tensor) -> Tensor:
        row, beside = _row(centred, centre)
        ctx.save_for_backward(centred, beside)
        return row

    @staticmethod
    def backward(ctx: Any, by_row: Tensor) -> tuple[Tensor, None]:
        centred, beside = ctx.saved_tensors
        channels, n = centred.shape[1], _count(centred)
        by_mean, by_squares, _ = by_row[0].split_with_sizes((channels, channels, 1))
        offset = by_mean / max(n, 1)
        if n and once(by_row):
            doubles = beside, torch.full_like(beside, 1 / 4)  # the kernel divides by a root
            return by_given_moments(centred, doubles, by_squares, offset, eps=0.0), None
        mean = centred.mean(_reduced(centred)) if n else centred.sum(_reduced(centred))
        off_mean = centred - by_channel(mean, centred)
        return off_mean * by_channel(2 * by_squares, centred) + by_channel(offset, centred), None


def by_given_moments(
    x: Tensor,
    moments: tuple[Tensor, Tensor],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """Torch's batch norm in eval mode. The one in nn.functional refuses an eps of 0 before torch 2.13."""
    return torch.batch_norm(x, weight, bias, *moments, False, 0.0, eps, False)
