"""Linear layers whose features are split among ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from allgrad.collectives.all_gather import all_gather, reduce_scatter, split
from allgrad.collectives.all_reduce import all_reduce, share
from allgrad.nn._ranks import feature_sizes, find_place

if TYPE_CHECKING:
    from allgrad.types import GroupLike, Sizes

__all__ = ["ColumnParallelLinear", "RowParallelLinear"]


class ColumnParallelLinear(nn.Module):
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

    weight: nn.Parameter
    bias: nn.Parameter | None

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
        super().__init__()
        place = find_place("ColumnParallelLinear", group)
        self.sizes = feature_sizes(
            "ColumnParallelLinear", "out_features", out_features, place.world, ragged=ragged
        )
        self.in_features, self.out_features = in_features, out_features
        self.gather_output, self.sequence_dim, self.group = gather_output, sequence_dim, group
        plain = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
        self._take(plain, place.rank)

    @classmethod
    def from_plain(
        cls,
        layer: nn.Linear,
        *,
        gather_output: bool = False,
        sequence_dim: int | None = None,
        ragged: bool = False,
        group: GroupLike = None,
    ) -> ColumnParallelLinear:
        """Take this rank's features of a plain layer, which is the same on every rank."""
        made = cls(
            layer.in_features,
            layer.out_features,
            layer.bias is not None,
            gather_output=gather_output,
            sequence_dim=sequence_dim,
            ragged=ragged,
            group=group,
            device="meta",
        )
        made._take(layer, find_place("ColumnParallelLinear", group).rank)
        return made

    def _take(self, plain: nn.Linear, rank: int) -> None:
        self.weight = _piece(plain.weight, 0, self.sizes, rank)
        self.bias = None if plain.bias is None else _piece(plain.bias, 0, self.sizes, rank)

    @torch.no_grad()
    def to_plain(self) -> nn.Linear:
        """Give every rank the plain layer, gathered from all pieces."""
        weight = all_gather(self.weight, sizes=self.sizes, group=self.group)
        bias = self.bias
        if bias is not None:
            bias = all_gather(bias, sizes=self.sizes, group=self.group)
        return _plain(weight, bias)

    def forward(self, x: Tensor, *, sizes: Sizes = None) -> Tensor:
        """Compute this rank's output features.

        ``sizes`` are each rank's tokens along ``sequence_dim``, as in ``all_gather``.
        """
        if self.sequence_dim is None:
            x = share(x, group=self.group)
        else:
            x = all_gather(x, self.sequence_dim, sizes=sizes, group=self.group)
        y = linear(x, self.weight, self.bias)
        if not self.gather_output:
            return y
        return all_gather(y, -1, sizes=self.sizes, group=self.group, grad="same")


class RowParallelLinear(nn.Module):
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

    weight: nn.Parameter
    bias: nn.Parameter | None

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
        super().__init__()
        place = find_place("RowParallelLinear", group)
        self.sizes = feature_sizes(
            "RowParallelLinear", "in_features", in_features, place.world, ragged=ragged
        )
        self.in_features, self.out_features = in_features, out_features
        self.split_input, self.sequence_dim, self.group = split_input, sequence_dim, group
        plain = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
        self._take(plain, place.rank)

    @classmethod
    def from_plain(
        cls,
        layer: nn.Linear,
        *,
        split_input: bool = False,
        sequence_dim: int | None = None,
        ragged: bool = False,
        group: GroupLike = None,
    ) -> RowParallelLinear:
        """Take this rank's features of a plain layer, which is the same on every rank."""
        made = cls(
            layer.in_features,
            layer.out_features,
            layer.bias is not None,
            split_input=split_input,
            sequence_dim=sequence_dim,
            ragged=ragged,
            group=group,
            device="meta",
        )
        made._take(layer, find_place("RowParallelLinear", group).rank)
        return made

    def _take(self, plain: nn.Linear, rank: int) -> None:
        self.weight = _piece(plain.weight, 1, self.sizes, rank)
        self.bias = None if plain.bias is None else nn.Parameter(plain.bias.detach().clone())

    @torch.no_grad()
    def to_plain(self) -> nn.Linear:
        """Give every rank the plain layer, gathered from all pieces."""
        return _plain(all_gather(self.weight, 1, sizes=self.sizes, group=self.group), self.bias)

    def forward(self, x: Tensor, *, sizes: Sizes = None) -> Tensor:
        """Sum what the ranks make of their input features.

        ``sizes`` are each rank's tokens along ``sequence_dim``; as even as possible unless given.
        """
        if self.split_input:
            x = split(x, -1, sizes=self.sizes, group=self.group)
        y, bias = linear(x, self.weight), self.bias
        if self.sequence_dim is None:
            y = all_reduce(y, group=self.group, grad="same")
        else:
            y = reduce_scatter(y, self.sequence_dim, sizes=sizes, group=self.group)
            bias = None if bias is None else share(bias, group=self.group)
        return y if bias is None else y + bias


def _piece(whole: Tensor, dim: int, sizes: tuple[int, ...], rank: int) -> nn.Parameter:
    # A piece of memory of its own: a view would keep the whole layer alive.
    return nn.Parameter(whole.detach().split(sizes, dim)[rank].clone())


def _plain(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    rows, columns = weight.shape
    made = nn.Linear(columns, rows, bias is not None, device="meta")
    made.weight = nn.Parameter(weight)
    if bias is not None:
        made.bias = nn.Parameter(bias.detach().clone())
    return made
