"""Batch norm over the samples of all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm
from torch.nn.utils.parametrize import is_parametrized

from allgrad._core.held_group import HoldsGroup
from allgrad.errors import InputError, TensorError
from allgrad.nn._moments import gather_moments
from allgrad.nn._normalise import normalise
from allgrad.nn._ranks import refuse, require_tensors

if TYPE_CHECKING:
    from allgrad.nn._moments import Moments
    from allgrad.types import GroupLike

__all__ = ["SyncBatchNorm", "convert"]

M = TypeVar("M", bound=nn.Module)


class SyncBatchNorm(HoldsGroup, nn.BatchNorm1d):
    """Normalise each channel by the mean and variance over the samples of all ranks.

        rank 0   [ a a ]                            normalised [ a a ]
        rank 1   [ b ]       mean, variance --->    normalised [ b ]
        rank 2   [ c c c ]   of aabccc              normalised [ c c c ]

    The twin of ``BatchNorm1d``, ``2d`` and ``3d`` on the joined batch: inputs are (N, C, ...) with
    any N on each rank, also none, and parameters, buffers and state_dict are theirs; ``bias=False``
    leaves out the bias, on every supported torch. Running
    statistics follow the joined batch, and are the same on every rank. In eval mode nothing is
    sent: each rank normalises by its own running statistics; with ``track_running_stats=False`` by
    those of its own samples, as torch's SyncBatchNorm does.

    Gradient: exact to any order, so that gradient penalties work. Each rank normalises its own
    samples by the statistics, hence ``grad="sum"``: a sample's gradient includes what it did to
    the samples of every rank.

        rank 0   A + via statistics                 [ A A ]
        rank 1   B + via statistics    <---         [ B ]
        rank 2   C + via statistics                 [ C C C ]

    A batch without any sample leaves the running statistics and their count as they are, one of a
    single value leaves the running variance, which is undefined then.

    Cost: one message of 2 C + 1 numbers from each rank to each, forward and backward.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        group: GroupLike = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype
        )
        if not bias:  # torch before 2.13 knows no such argument
            self.register_parameter("bias", None)
        self.group = group

    def reset_parameters(self) -> None:
        """Forget what was learned and tracked."""
        self.reset_running_stats()
        if self.affine:
            nn.init.ones_(self.weight)
            if self.bias is not None:
                nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise this rank's samples."""
        require_tensors("SyncBatchNorm", self.group, x=x)
        if x.dim() < 2 or x.shape[1] != self.num_features or not x.is_floating_point():
            problem = TensorError(
                f"SyncBatchNorm: x is {tuple(x.shape)} {x.dtype}, not (N, {self.num_features}, ...) "
                "of floating-point numbers.\nGive samples first, then the channels."
            )
            if not self.training:  # nothing is sent
                raise problem
            refuse("SyncBatchNorm", self.group, problem)
        if not self.training:
            local = self.running_mean is None
            return batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, local, 0.0, self.eps
            )
        y, found = normalise(gather_moments(x, self.group), self.weight, self.bias, self.eps)
        if self.track_running_stats and self.running_mean is not None:
            self._track(found)
        return y.to(x.dtype)

    @torch.no_grad()
    def _track(self, found: Moments) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        mean, squares, number = found
        part = mean.new_full((), self.momentum or 0.0)
        if self.num_batches_tracked is not None:
            self.num_batches_tracked += number >= 1
            if self.momentum is None:
                part = self.num_batches_tracked.clamp(min=1).to(mean.dtype).reciprocal()
        variance = squares / (number - 1).clamp(min=1)
        for running, new, least in ((self.running_mean, mean, 1), (self.running_var, variance, 2)):
            running.lerp_(new.to(running.dtype), (part * (number >= least)).to(running.dtype))


def convert(module: M, group: GroupLike = None) -> M | SyncBatchNorm:
    """Replace every batch norm of torch inside ``module`` by a ``SyncBatchNorm`` over ``group``.

    Parameters and buffers are taken over, not copied. The module itself is changed, and returned;
    where it is a batch norm, its replacement is, without its hooks. A SyncBatchNorm of ours stays as it
    is, unless a group is given. What no SyncBatchNorm can stand for raises: a lazy batch norm without features
    yet, one whose parameters are computed, and a subclass with a forward of its own.
    """
    made: dict[nn.Module, SyncBatchNorm] = {}
    # A batch norm may stand in several places (test_convert_of_a_norm_that_is_used_twice).
    everywhere = list(module.named_modules(remove_duplicate=False))
    for name, plain in everywhere:
        if isinstance(plain, _LAZY):
            raise InputError(
                f"convert: {_named(name, plain)} does not know its features yet.\n"
                "Run a batch through the module before the call."
            )
        if isinstance(plain, SyncBatchNorm) and group is None:
            continue
        if isinstance(plain, _NORMS) and plain not in made:
            if type(plain).forward not in _FORWARDS or is_parametrized(plain):
                raise InputError(
                    f"convert: {_named(name, plain)} has a forward of its own, or parameters that are "
                    "computed, which a SyncBatchNorm would leave out.\n"
                    "Replace it by a batch norm of torch and what it adds to one."
                )
            made[plain] = _converted(plain, group)
    for name, plain in everywhere:
        if plain in made and name:
            module.set_submodule(name, made[plain])
    return made.get(module, module)


_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
_LAZY = nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d
_FORWARDS = nn.BatchNorm1d.forward, nn.SyncBatchNorm.forward, SyncBatchNorm.forward


def _named(name: str, module: nn.Module) -> str:
    return f"{name or 'the module'}, a {type(module).__name__},"


def _converted(
    plain: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm, group: GroupLike
) -> SyncBatchNorm:
    made = SyncBatchNorm(
        plain.num_features,
        plain.eps,
        plain.momentum,
        plain.affine,
        plain.track_running_stats,
        group=group,
        device="meta",
    )
    made.weight, made.bias = plain.weight, plain.bias
    made.running_mean, made.running_var = plain.running_mean, plain.running_var
    made.num_batches_tracked = plain.num_batches_tracked
    return made.train(plain.training)
