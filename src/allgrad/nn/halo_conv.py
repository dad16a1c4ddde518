"""Convolutions of a tensor whose pieces lie on ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn
from torch.nn.functional import conv1d, conv2d, conv3d, pad

from allgrad._core.held_group import HoldsGroup
from allgrad.errors import InputError
from allgrad.nn._ranks import find_place, require_layer, require_tensors
from allgrad.nn.halo import halo_exchange, lengths_along

if TYPE_CHECKING:
    from collections.abc import Sequence

    from allgrad.types import GroupLike

__all__ = ["HaloConv1d", "HaloConv2d", "HaloConv3d"]

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d
C = TypeVar("C", bound=Conv)
_FUNCTIONS = {1: conv1d, 2: conv2d, 3: conv3d}


class HaloConv1d(HoldsGroup, nn.Conv1d):
    """A convolution of the joined tensor, of which each rank holds a piece along ``dim``.

        kernel of 3                   with halo          convolved
        rank 0   [ a b ]              [ 0 a b c ]        [ A B ]
        rank 1   [ c ]       --->     [ b c d ]    --->  [ C ]
        rank 2   [ d e f ]            [ c d e f 0 ]      [ D E F ]

    Each rank gets its piece of what the plain layer makes of the joined tensor. ``dim`` is a
    spatial dim, counted from the back, and its padding must keep the length: ``"same"``, or half
    of what the kernel spans. With a stride, an output belongs to the rank that holds the input at
    its place. ``padding_mode`` is ``"zeros"`` or ``"circular"``. Pieces may be empty.

    Gradient: exact to any order; that of an edge comes back from the neighbour. Each rank applies
    the weights to its own piece, so their gradients are parts, whose sum a wrapper takes (DDP,
    FSDP), or ``share``.

    Cost: one message to each neighbour each way, plus one size exchange unless ``sizes`` is given.
    """

    def __init__(self, *args: Any, dim: int = -1, group: GroupLike = None, **options: Any) -> None:
        """As the plain layer."""
        super().__init__(*args, **options)
        self.dim, self.group = dim, group
        _check(self, dim)

    @classmethod
    def from_plain(cls, layer: nn.Conv1d, *, dim: int = -1, group: GroupLike = None) -> HaloConv1d:
        """Take over the parameters of a plain layer, which is the same on every rank."""
        require_layer(cls, layer, nn.Conv1d)
        return _with_parameters_of(layer, cls(**_options(layer), dim=dim, group=group))

    def to_plain(self) -> nn.Conv1d:
        """Give the plain layer with the same parameters."""
        return _with_parameters_of(self, nn.Conv1d(**_options(self)))

    def forward(self, x: Tensor, *, sizes: Sequence[int] | None = None) -> Tensor:
        """Convolve this rank's piece; ``sizes`` are what each rank holds along ``dim``."""
        return _convolve_piece(self, x, self.dim, sizes, self.group)


class HaloConv2d(HoldsGroup, nn.Conv2d):
    """``HaloConv1d`` in two dimensions: ``dim=-1`` splits the width, ``dim=-2`` the height."""

    def __init__(self, *args: Any, dim: int = -1, group: GroupLike = None, **options: Any) -> None:
        """As the plain layer."""
        super().__init__(*args, **options)
        self.dim, self.group = dim, group
        _check(self, dim)

    @classmethod
    def from_plain(cls, layer: nn.Conv2d, *, dim: int = -1, group: GroupLike = None) -> HaloConv2d:
        """Take over the parameters of a plain layer, which is the same on every rank."""
        require_layer(cls, layer, nn.Conv2d)
        return _with_parameters_of(layer, cls(**_options(layer), dim=dim, group=group))

    def to_plain(self) -> nn.Conv2d:
        """Give the plain layer with the same parameters."""
        return _with_parameters_of(self, nn.Conv2d(**_options(self)))

    def forward(self, x: Tensor, *, sizes: Sequence[int] | None = None) -> Tensor:
        """Convolve this rank's piece; ``sizes`` are what each rank holds along ``dim``."""
        return _convolve_piece(self, x, self.dim, sizes, self.group)


class HaloConv3d(HoldsGroup, nn.Conv3d):
    """``HaloConv1d`` in three dimensions: ``dim`` from -3 to -1 is the one that is split."""

    def __init__(self, *args: Any, dim: int = -1, group: GroupLike = None, **options: Any) -> None:
        """As the plain layer."""
        super().__init__(*args, **options)
        self.dim, self.group = dim, group
        _check(self, dim)

    @classmethod
    def from_plain(cls, layer: nn.Conv3d, *, dim: int = -1, group: GroupLike = None) -> HaloConv3d:
        """Take over the parameters of a plain layer, which is the same on every rank."""
        require_layer(cls, layer, nn.Conv3d)
        return _with_parameters_of(layer, cls(**_options(layer), dim=dim, group=group))

    def to_plain(self) -> nn.Conv3d:
        """Give the plain layer with the same parameters."""
        return _with_parameters_of(self, nn.Conv3d(**_options(self)))

    def forward(self, x: Tensor, *, sizes: Sequence[int] | None = None) -> Tensor:
        """Convolve this rank's piece; ``sizes`` are what each rank holds along ``dim``."""
        return _convolve_piece(self, x, self.dim, sizes, self.group)


def _convolve_piece(
    layer: Conv, x: Tensor, dim: int, sizes: Sequence[int] | None, group: GroupLike
) -> Tensor:
    name = type(layer).__name__
    require_tensors(name, group, x=x)
    at, axis = dim + x.dim(), dim + len(layer.kernel_size)
    sizes = lengths_along(name, x, at, sizes, group)
    span, (before, after) = _span(layer, axis), _padding(layer, axis)
    wrap = layer.padding_mode == "circular"
    x = halo_exchange(x, at, before, after, wrap, sizes=sizes, group=group)
    rank = find_place(name, group).rank
    # Output j belongs to the rank that holds input j * stride.
    skipped = -sum(sizes[:rank]) % layer.stride[axis]
    if sizes[rank] > skipped:
        return _convolve(layer, x.narrow(at, skipped, x.shape[at] - skipped), axis)
    # No output here: the convolution of something, of which nothing is kept, has the right shape.
    return _convolve(layer, pad(x, [0, 0] * (-1 - dim) + [0, span]), axis).narrow(at, 0, 0)


def _convolve(layer: Conv, x: Tensor, split_axis: int) -> Tensor:
    """The plain convolution, without padding in the split dim."""
    axes = range(len(layer.kernel_size))
    pairs = [(0, 0) if axis == split_axis else _padding(layer, axis) for axis in axes]
    padding = [a for a, _ in pairs]
    if layer.padding_mode == "circular" or any(a != b for a, b in pairs):
        mode = "circular" if layer.padding_mode == "circular" else "constant"
        x = pad(x, [n for pair in reversed(pairs) for n in pair], mode=mode)
        padding = [0 for _ in axes]
    conv = _FUNCTIONS[len(padding)]
    return conv(x, layer.weight, layer.bias, layer.stride, padding, layer.dilation, layer.groups)


def _span(layer: Conv, axis: int) -> int:
    """From the first to the last input of an output."""
    return int(layer.dilation[axis] * (layer.kernel_size[axis] - 1) + 1)


def _padding(layer: Conv, axis: int) -> tuple[int, int]:
    if isinstance(layer.padding, str):
        both = _span(layer, axis) - 1 if layer.padding == "same" else 0
        return both // 2, both - both // 2
    return layer.padding[axis], layer.padding[axis]


def _check(layer: Conv, dim: int) -> None:
    name, spatial = type(layer).__name__, len(layer.kernel_size)
    if not -spatial <= dim < 0:
        raise InputError(
            f"{name}: dim={dim} does not name a spatial dim from the back.\n"
            f"Give a dim from {-spatial} to -1, which is the last one."
        )
    axis = dim + spatial
    if sum(_padding(layer, axis)) != _span(layer, axis) - 1:
        raise InputError(
            f"{name}: padding={layer.padding!r} changes the length along dim {dim}, where the kernel "
            f'spans {_span(layer, axis)}.\nGive padding="same", or half of what it spans.'
        )
    if layer.padding_mode not in {"zeros", "circular"}:
        raise InputError(
            f'{name}: there is no padding_mode={layer.padding_mode!r}.\nUse "zeros" or "circular".'
        )


def _options(layer: Conv) -> dict[str, Any]:
    names = (
        "in_channels",
        "out_channels",
        "kernel_size",
        "stride",
        "padding",
        "dilation",
        "groups",
    )
    options = {name: getattr(layer, name) for name in (*names, "padding_mode")}
    return {**options, "bias": layer.bias is not None, "device": "meta"}


def _with_parameters_of(layer: Conv, made: C) -> C:
    made.weight, made.bias = layer.weight, layer.bias
    return made
