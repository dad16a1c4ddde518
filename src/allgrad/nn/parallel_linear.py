"""Linear layers whose features are split among ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from allgrad._core.held_group import HoldsGroup
from allgrad.collectives.all_gather import all_gather, reduce_scatter, split
from allgrad.collectives.all_reduce import all_reduce, share
from allgrad.errors import TensorError
from allgrad.nn._ranks import feature_sizes, find_place, refuse, require_layer, require_own_piece

if TYPE_CHECKING:
    from typing import Self

    from allgrad.types import GroupLike, Sizes

__all__ = ["ColumnParallelLinear", "RowParallelLinear"]


class _ParallelLinear(HoldsGroup, nn.Module):
    """A piece of a plain layer, along the dim of the weight that a subclass names."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    split_dim: ClassVar[int]  # of the weight (out_features, in_features)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        *,
        sequence_dim: int | None,
        ragged: bool,
        group: GroupLike,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        place = find_place(name, group)
        what = ("out_features", "in_features")[self.split_dim]
        features = (out_features, in_features)[self.split_dim]
        self.sizes = feature_sizes(name, what, features, place.world, ragged=ragged)
        self.in_features, self.out_features = in_features, out_features
        self.sequence_dim, self.group = sequence_dim, group
        plain = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
        self._take(plain, place.rank)

    @classmethod
    def _made_from(cls, layer: nn.Linear, **options: Any) -> Self:
        require_layer(cls, layer, nn.Linear)
        features = layer.in_features, layer.out_features
        made = cls(*features, layer.bias is not None, device="meta", dtype=None, **options)
        made._take(layer, find_place(cls.__name__, made.group).rank)
        return made

    def _take(self, plain: nn.Linear, rank: int) -> None:
        # Pieces of memory of their own: a view would keep the whole layer alive.
        weight, bias = self._pieces(plain, rank)
        self.weight = nn.Parameter(weight.clone(), plain.weight.requires_grad)
        self.bias = None
        if bias is not None:
            self.bias = nn.Parameter(bias.detach().clone(), plain.bias.requires_grad)

    def _pieces(self, plain: nn.Linear, rank: int) -> tuple[Tensor, Tensor | None]:
        weight = plain.weight.detach().split(self.sizes, self.split_dim)[rank]
        bias: Tensor | None = plain.bias
        if bias is None or self.split_dim:  # of output features: held by every rank,
            return weight, bias
        return weight, bias.split(self.sizes)[rank]  # or split with them

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the parameters anew; seeded alike, the ranks have those of a plain layer with this seed."""
        own, has_bias = self.weight, self.bias is not None
        features = self.in_features, self.out_features
        plain = nn.Linear(*features, has_bias, device=own.device, dtype=own.dtype)
        weight, bias = self._pieces(plain, find_place(type(self).__name__, self.group).rank)
        own.copy_(weight)
        if self.bias is not None and bias is not None:
            self.bias.copy_(bias)

    def _check(self, x: Tensor, features: int, *, sends: bool) -> None:
        """Raise unless the weight is this rank's, and the last dim of ``x`` has so many features, of
        its dtype.

        ``sends`` tells whether the other ranks come to a collective of this layer.
        """
        name, held = type(self).__name__, self.weight.shape[self.split_dim]
        require_own_piece(name, self.group, self.sizes, held, sends=sends)
        dtype, shown = self.weight.dtype, type(x).__name__
        if isinstance(x, Tensor):
            # meta has no autocast
            cast = (
                x.is_floating_point() and not x.is_meta and torch.is_autocast_enabled(x.device.type)
            )
            if x.dim() and x.shape[-1] == features and (x.dtype == dtype or cast):
                return
            shown = f"{tuple(x.shape)} {x.dtype}"
        problem = TensorError(
            f"{name}: x is {shown} on this rank, not (..., {features}) {dtype}.\n"
            f"Give {features} features in the last dim, in the dtype of the weight."
        )
        if not sends:
            raise problem
        refuse(name, self.group, problem)

    def extra_repr(self) -> str:
        """The plain layer's, and what each rank holds of it."""
        has_bias = self.bias is not None
        return f"{self.in_features}, {self.out_features}, bias={has_bias}, sizes={self.sizes}"

    @torch.no_grad()
    def to_plain(self) -> nn.Linear:
        """Give every rank the plain layer, gathered from all pieces."""
        weight = all_gather(self.weight, self.split_dim, sizes=self.sizes, group=self.group)
        made = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        made.weight = nn.Parameter(weight, self.weight.requires_grad)
        if self.bias is not None:
            bias = self.bias.detach().clone()
            if not self.split_dim:
                bias = all_gather(bias, sizes=self.sizes, group=self.group)
            made.bias = nn.Parameter(bias, self.bias.requires_grad)
        return made


class ColumnParallelLinear(_ParallelLinear):
    """A linear layer of which each rank computes some output features.

        rank 0   x                    [ y y ]
        rank 1   x           --->     [ y y ]         gather_output=True: [ y y y y y ] on all
        rank 2   x                    [ y ]

    Every rank holds the same ``x``, and gets its piece of the last dim of the plain layer's output.
    With ``sequence_dim`` each rank holds its tokens only, a piece of ``x`` along that dim, and
    gets its features of all tokens.

    Gradient: ``x`` is one value that each rank uses in its own way, so it goes through ``share``:
    its gradient is the sum over ranks. Pieces of ``x`` are gathered with ``grad="sum"`` for the same
    reason. A gathered output is for work that every rank does alike, so that the loss counts once:
    ``grad="same"``.

        rank 0   X0 + X1 + X2         [ Y Y ]
        rank 1   X0 + X1 + X2  <---   [ Y Y ]
        rank 2   X0 + X1 + X2         [ Y ]

    Seeded alike, the ranks together have the weights that a plain layer has with this seed.
    ``ragged=True`` allows a number of features that the ranks do not divide.

    Cost: backward one collective as large as ``x``; with ``sequence_dim`` forward one too; with
    ``gather_output`` forward one as large as the output.
    """

    split_dim = 0

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        gather_output: bool = False,
        sequence_dim: int | None = None,
        ragged: bool = False,
        group: GroupLike = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            bias,
            sequence_dim=sequence_dim,
            ragged=ragged,
            group=group,
            device=device,
            dtype=dtype,
        )
        self.gather_output = gather_output

    @classmethod
    def from_plain(
        cls,
        layer: nn.Linear,
        *,
        gather_output: bool = False,
        sequence_dim: int | None = None,
        ragged: bool = False,
        group: GroupLike = None,
    ) -> Self:
        """Take this rank's features of a plain layer, which is the same on every rank."""
        return cls._made_from(
            layer,
            gather_output=gather_output,
            sequence_dim=sequence_dim,
            ragged=ragged,
            group=group,
        )

    def forward(self, x: Tensor, *, sizes: Sizes = None) -> Tensor:
        """Compute this rank's output features.

        ``sizes`` are each rank's tokens along ``sequence_dim``, as in ``all_gather``.
        """
        local = self.sequence_dim is None and not self.gather_output
        self._check(x, self.in_features, sends=not local or torch.is_grad_enabled())
        if self.sequence_dim is None:
            x = share(x, group=self.group)
        else:
            x = all_gather(x, self.sequence_dim, sizes=sizes, group=self.group)
        y = linear(x, self.weight, self.bias)
        if not self.gather_output:
            return y
        return all_gather(y, -1, sizes=self.sizes, group=self.group, grad="same")


class RowParallelLinear(_ParallelLinear):
    """A linear layer of which each rank takes some input features.

        rank 0   [ x x ]              y = W0 x0 + W1 x1 + W2 x2 + bias
        rank 1   [ x x ]     --->     y
        rank 2   [ x ]                y

    Each rank holds its piece of the last dim of ``x``, as a ``ColumnParallelLinear`` gives it;
    with ``split_input`` it holds all of ``x`` and takes its piece. Every rank gets the plain
    layer's output; with ``sequence_dim`` its tokens of it, a piece along that dim.

    Gradient: every rank does the same work with ``y``, so the loss counts once: the sum has
    ``grad="same"``, and nothing is sent back. With ``sequence_dim`` each rank works on its own
    tokens: the sum is scattered, and the bias goes through ``share``, as each rank uses it.

        rank 0   W0' Y                [ Y ]
        rank 1   W1' Y         <---   [ Y ]
        rank 2   W2' Y                [ Y ]

    Seeds and ``ragged`` as in ``ColumnParallelLinear``. The bias is held by every rank.

    Cost: forward one collective as large as ``y``; backward none, with ``sequence_dim`` one and a
    sum of the bias, with ``split_input`` one as large as ``x``.
    """

    split_dim = 1

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        split_input: bool = False,
        sequence_dim: int | None = None,
        ragged: bool = False,
        group: GroupLike = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            bias,
            sequence_dim=sequence_dim,
            ragged=ragged,
            group=group,
            device=device,
            dtype=dtype,
        )
        self.split_input = split_input

    @classmethod
    def from_plain(
        cls,
        layer: nn.Linear,
        *,
        split_input: bool = False,
        sequence_dim: int | None = None,
        ragged: bool = False,
        group: GroupLike = None,
    ) -> Self:
        """Take this rank's features of a plain layer, which is the same on every rank."""
        return cls._made_from(
            layer,
            split_input=split_input,
            sequence_dim=sequence_dim,
            ragged=ragged,
            group=group,
        )

    def forward(self, x: Tensor, *, sizes: Sizes = None) -> Tensor:
        """Sum what the ranks make of their input features.

        ``sizes`` are each rank's tokens along ``sequence_dim``; as even as possible unless given.
        """
        own = self.in_features if self.split_input else self.weight.shape[1]
        self._check(x, own, sends=True)
        if self.split_input:
            x = split(x, -1, sizes=self.sizes, group=self.group)
        y, bias = linear(x, self.weight), self.bias
        if self.sequence_dim is None:
            y = all_reduce(y, group=self.group, grad="same")
        else:
            y = reduce_scatter(y, self.sequence_dim, sizes=sizes, group=self.group)
            bias = None if bias is None else share(bias, group=self.group)
        return y if bias is None else y + bias.to(y.dtype)  # autocast leaves the bias as it is
